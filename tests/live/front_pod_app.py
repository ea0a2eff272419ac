"""The application of the manifests, with the folder of its front pod elsewhere."""

import os
from pathlib import Path

from kappa_deploy import front_pod, serve_app

FOLDER_ENV = "FRONT_POD_FOLDER"


def app(args):
    front_pod.FOLDER = Path(os.environ[FOLDER_ENV])
    return serve_app.app(args)

"""The application as a Ray Serve config file names it: `import_path: kappa_deploy.serve_app:app`.

For clusters that others start, KubeRay's RayService above all: a decider in each front pod
(`kappa_deploy.front_pod`), beside an Envoy with the configuration of `front_door`. `args` holds the
same keys as the file of `kappa serve --config`; `http.replicas` is the number of front pods.
`python -m kappa_deploy.serve_app [SETTINGS]` makes the model of the demo, or fetches `smollm2-135m`
if the settings name that, where each machine will look for it.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from kappa.settings.cluster import ClusterSettings, load_settings
from kappa_deploy import front_pod
from kappa_deploy.app.build import build_app
from kappa_deploy.app.front_door import front_door_spec
from kappa_deploy.app.model import prepare_models
from kappa_router.gateway.spec import GatewaySpec

_HTTP = {"host": "0.0.0.0", "port": 8000}


def settings_of(args: dict[str, Any]) -> ClusterSettings:
    """The settings in an application's `args`.

    Raises:
        SettingsError: with every key at fault and the reason.
    """
    http = args.get("http") or {}
    if isinstance(http, dict):
        http = {**_HTTP, **http}
    return load_settings(None, **{**args, "http": http})


def front_door(settings: ClusterSettings) -> GatewaySpec:
    """The front door of one front pod, which has one decider."""
    http = settings.http.model_copy(update={"replicas": 1})
    return front_door_spec(settings.model_copy(update={"http": http}), front_pod.FOLDER)


def app(args: dict[str, Any]) -> Any:
    """The bound Serve application; called by Ray Serve with the config file's `args`."""
    settings = settings_of(args)
    # Workers are on machines of their own: each offers its stream on its address in Ray's cluster.
    models, door = prepare_models(settings), front_door(settings)
    return build_app(settings, models, door, stream_host="", place={front_pod.RESOURCE: 1.0})


def main() -> None:
    """Make, or check, the models that the settings name."""
    path = sys.argv[1] if len(sys.argv) > 1 else None
    for model in prepare_models(load_settings(path), partial(print, file=sys.stderr)):
        print(model.source)


if __name__ == "__main__":
    main()

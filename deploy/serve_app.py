"""The application as a Ray Serve config file names it: `import_path: deploy.serve_app:app`.

For clusters that others start (KubeRay's RayService, `serve deploy`). `args` holds the same keys as
the file of `kappa serve --config`, save `http`, which is the config file's own `http_options`.
`python -m deploy.serve_app [SETTINGS]` makes the model of the demo, or fetches `smollm2-135m` if
the settings name that, where each machine will look for it.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from deploy.app.build import build_app
from deploy.app.model import prepare_models
from kappa.settings.base import SettingsError
from kappa.settings.cluster import ClusterSettings, load_settings


def settings_of(args: dict[str, Any]) -> ClusterSettings:
    """The settings in an application's `args`.

    Raises:
        SettingsError: with every key at fault and the reason.
    """
    if "http" in args:
        raise SettingsError(
            "args: http has no place here; set http_options beside applications in the Serve "
            "config file"
        )
    settings = load_settings(None, **args)
    # Where Serve listens is not ours to see; its config files default to every address.
    if not (settings.tenants.closed or settings.access.allow_open):
        raise SettingsError(
            "args: anybody who reaches the endpoint would be served without a key: give "
            "tenants.keys_file and tenants.unknown: refuse, or say access.allow_open: true if a "
            "proxy or network policy guards it"
        )
    return settings


def app(args: dict[str, Any]) -> Any:
    """The bound Serve application; called by Ray Serve with the config file's `args`."""
    settings = settings_of(args)
    # Workers are on machines of their own: each offers its stream on its address in Ray's cluster.
    return build_app(settings, prepare_models(settings), stream_host="")


def main() -> None:
    """Make, or check, the models that the settings name."""
    path = sys.argv[1] if len(sys.argv) > 1 else None
    for model in prepare_models(load_settings(path), partial(print, file=sys.stderr)):
        print(model.source)


if __name__ == "__main__":
    main()

"""Which cluster a bench runs on: the demo's, one from a file, or two real nodes of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kappa.settings.cluster import ClusterSettings
from kappa_benchmarks.harness import note
from kappa_deploy.commands.serve import Config, settings_or_exit
from kappa_router.console import fail

if TYPE_CHECKING:
    from kappa_deploy.app.model import Model

__all__ = ["Config", "ModelName", "Unpaced", "bench_model", "bench_settings"]

Unpaced = Annotated[
    bool, typer.Option("--unpaced", help="Real speed of this machine instead of paced nodes.")
]

ModelName = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="A folder, a name on the hub, or smollm2-135m; with --unpaced and without "
        "--config on two unlike CPU nodes of this machine.",
    ),
]


def bench_settings(
    config: Path | None, model: str | None, unpaced: bool, **sections: Any
) -> ClusterSettings:
    """The cluster to measure, on a free port; `sections` of its settings are updated by key."""
    settings = settings_or_exit(config, port=0, unpaced=unpaced)
    # All systems and policies that are compared serve the same requests.
    sections["router"] = {"admission": False} | sections.get("router", {})
    if model is not None:
        served = {"id": Path(model).name, "source": model}
        sections["model"] = served | sections.get("model", {})
    if model is not None and unpaced and config is None:
        settings = settings_or_exit(port=0, defaults=True)
    return settings.model_copy(
        update={
            name: getattr(settings, name).model_copy(update=changes)
            for name, changes in sections.items()
        }
    )


def bench_model(settings: ClusterSettings) -> Model:
    """The model that is measured; one that cannot be had is a message and exit code 1."""
    # Imports transformers: only when it is wanted.
    from kappa_deploy.app.errors import StartError
    from kappa_deploy.app.model import prepare_model

    try:
        return prepare_model(settings, note)
    except StartError as error:
        fail(str(error))

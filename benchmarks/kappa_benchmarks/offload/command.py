"""`kappa bench offload`: what load plans are worth on this machine, predicted beside measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kappa_benchmarks.harness import Json, publish, usage_errors


def offload(
    setting: Annotated[
        list[str] | None,
        typer.Option(
            help="cpu-small, cpu-paced, cpu-paced-fast (KVPR, HybridServe, first tokens), "
            "cpu-offload-small, -paced (the CPU attends), clo-cpu, clo-cpu-paced (sparse), "
            "clo-answers (what sparse does to answers), clo-codes, clo-parts (measured heads), "
            "clo-loading (beside loading everything), mixture-kvpr, -hybrid (link and processor "
            "equals), weights-kvpr, -hybrid, -cpu, -cpu-large (weights in host memory); repeatable."
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=5, help="Rounds, beside a warm-up.")] = 5,
    only: Annotated[
        list[str] | None, typer.Option(help="Part of a cell's name: 8x256, column, ttft.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the result here, as JSON.")] = None,
    json_output: Json = False,
) -> None:
    """Ways to bring a cache back from host memory, in turns: KV, activations, recomputation."""
    with usage_errors():
        # torch: only when it is wanted.
        from kappa_benchmarks.offload import run
        from kappa_benchmarks.offload.cells import setting as setting_named

        settings = [setting_named(name) for name in setting or ["cpu-small"]]
        facts = run.Run(run.selected(settings, only or ()), repeats, out).run()
    publish(facts, lambda console: run.show(facts, console), json_output=json_output, out=out)
    if not facts["rows"]:
        raise typer.Exit(1)

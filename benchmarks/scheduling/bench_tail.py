"""`kappa bench tail-recompute`: what computing the back of a cached prefix saves in vLLM, paced."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.harness import Json, OutFile, note, publish, result, save_json, table

_WORST = 0.03


def tail_recompute(
    ratios: Annotated[
        str, typer.Option(help="κ0 of the nodes, with commas: link seconds in one of compute.")
    ] = "10,1,0.3",
    cached: Annotated[str, typer.Option(help="Cached tokens, with commas.")] = "2048",
    new: Annotated[str, typer.Option(help="New tokens, with commas.")] = "32,128",
    loads: Annotated[
        str, typer.Option(help="How loads run, with commas: ahead, or layers (beside).")
    ] = "ahead,layers",
    repeats: Annotated[int, typer.Option(min=1, help="Pairs per row.")] = 5,
    model: Annotated[str, typer.Option(help="Whose costs the nodes emulate.")] = "llama-3.1-8b",
    node: Annotated[str, typer.Option(help="The node whose link is changed.")] = "pcie",
    out: OutFile = None,
    json_output: Json = False,
) -> None:
    """TTFT of loading all and of computing the back, on paced nodes of several links."""
    # vLLM is imported here: other commands must not wait for it.
    from benchmarks.scheduling import tail_recompute as bench

    sizes = [(int(c), int(n)) for c in cached.split(",") for n in new.split(",")]
    longest = max(c for c, _ in sizes)
    context = max(c + n for c, n in sizes) + 2 * bench.BLOCK_TOKENS
    rows: list[dict[str, Any]] = []
    facts: dict[str, Any] = {}
    for load in loads.split(","):
        with bench.engine(load, context) as llm:
            for critical in map(float, ratios.split(",")):
                ratio = bench.ratio_of(model, node, critical, longest, load)
                rows += bench.measure(llm, ratio, sizes, repeats, note)
                facts = result(
                    rows=rows, model=model, node=node, paced=True,
                    worst_change=max(row["change"] for row in rows), limit=_WORST,
                )  # fmt: skip
                if out is not None:  # as far as it is: a run may be cut short
                    save_json(facts, out)
    columns = (
        "loads", "κ0", "cached", "new", "κ", "κ_eff", "computed anew", "load all ms", "tail ms",
        "change", "predicted", "Δ logprob",
    )  # fmt: skip

    def show(console: Console) -> None:
        console.print(table("", columns, [_cells(row) for row in rows]))

    publish(facts, show, json_output=json_output, remark="paced")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["load"], f"{row['critical_ratio']:g}",
        str(row["cached_tokens"]), str(row["new_tokens"]),
        f"{row['ratio']:.0f}", f"{row['effective_ratio']:.1f}", str(row["recomputed_tokens"]),
        f"{1e3 * row['load_all_s']:.2f}", f"{1e3 * row['tail_s']:.2f}",
        f"{row['change']:+.1%}", f"{row['predicted_change']:+.1%}",
        f"{row['logprob_difference']:.1e}",
    )  # fmt: skip

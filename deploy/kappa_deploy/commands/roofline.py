"""`kappa roofline`: the rooflines of paper 001's Figures 4 and 7, drawn from its own peaks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kappa import paper
from kappa.model import ModelShape, kv_bytes_per_token
from kappa.shapes import model_shape
from kappa_deploy.commands.console import Json, KvDtype, bad_parameter, print_json, print_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MODELS = ("qwen3-235b-a22b", "deepseek-v3")
_GPU_COLOURS = {"A100": "#4c72b0", "H100": "#55a868", "B200": "#c44e52"}
_LINK_COLOURS = {"PCIe-5": "#c44e52", "NVLink-C2C": "#8172b3", "unified HBM": "#64b5cd"}
_MARKERS = ("o", "s", "^", "D", "v")
_LEAST, _MOST = 1e1, 1e7  # FLOP/byte


def roofline(
    out: Annotated[Path, typer.Option("--out", help="PNG to write.")] = Path("roofline.png"),
    model: Annotated[
        list[str] | None, typer.Option("--model", help="Built-in name or config.json; repeat.")
    ] = None,
    kv_dtype: KvDtype = "auto",
    json_output: Json = False,
) -> None:
    """Draw the rooflines of paper 001's Figures 4 and 7, with its peaks and units."""
    with bad_parameter():
        shapes = [model_shape(name, kv_dtype) for name in model or _MODELS]
        if not out.parent.is_dir():
            raise ValueError(f"{out.parent} is not a folder: create it, or change --out")
    draw_rooflines(out, shapes)
    if json_output:
        print_json({"out": str(out), "models": [shape.name for shape in shapes]})
    else:
        print_text(f"Wrote {out}")


def draw_rooflines(out: Path, shapes: Sequence[ModelShape]) -> None:
    """Write both panels as a PNG: GPUs by PCIe generation (left), a B200 by link (right)."""
    # Drawing is rare and matplotlib slow to import; the other commands should not wait for it.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 6.5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    # The GPUs share the links' slopes: one grey line each, or the last GPU would hide the others.
    for link, style in (("PCIe-4", "--"), ("PCIe-5", "-")):
        peak, rate = _roof("B200", link)
        ends = [_LEAST, peak / rate]
        left.plot(ends, [rate * x for x in ends], color="0.55", linestyle=style, label=link)
    for gpu, colour in _GPU_COLOURS.items():
        peak, rate = _roof(gpu, "PCIe-5")
        left.plot((peak / rate, _MOST), (peak, peak), color=colour, linewidth=2, label=gpu)
    for link, colour in _LINK_COLOURS.items():
        peak, rate = _roof("B200", link)
        ends = [_LEAST, peak / rate, _MOST]
        heights = [min(peak, rate * x) for x in ends]
        right.plot(ends, heights, color=colour, linewidth=2, label=f"B200, {link}")
    for index, shape in enumerate(shapes):
        marker = _MARKERS[index % len(_MARKERS)]
        place = (index % 2 == 1, marker)
        _draw_ratios(left, shape, _roof("H100", "PCIe-5"), (1, 10, 100, 1000), place)
        for link in _LINK_COLOURS:
            ratios = (100, 5000) if link != "unified HBM" else (5000,)
            _draw_ratios(right, shape, _roof("B200", link), ratios, (False, marker))
        for axes in (left, right):
            axes.plot([], [], marker=marker, color="black", linestyle="none", label=shape.name)
    left.set_title("Figure 4: GPUs and PCIe generations (points on H100, PCIe-5)")
    right.set_title("Figure 7: a B200 behind PCIe-5, NVLink-C2C, unified HBM")
    left.set_ylabel("attainable FLOP/s")
    for axes in (left, right):
        axes.set(xscale="log", yscale="log", xlim=(2e1, 3e6), ylim=(1e12, 1.2e16))
        axes.set_xlabel("arithmetic intensity of offloaded prefill, (F/M)/κ, FLOP/byte")
        axes.grid(True, which="major", alpha=0.25)
        axes.legend(loc="lower right", fontsize=9)
    figure.suptitle(
        "Rooflines of KV offloading, peaks as paper 001 prints them (FP16 with sparsity)"
    )
    figure.savefig(out, dpi=120)


def _roof(gpu: str, link: str) -> tuple[float, float]:
    """Peak FLOP/s and link bytes/s in the paper's units: PCIe binary, the rest decimal."""
    peak = paper.SPARSE_FP16_TFLOPS[gpu] * 1e12
    kb_per_gb = 1024.0**2 if link.startswith("PCIe") else 1e6
    return peak, paper.LINK_GB_PER_S[link] * kb_per_gb * paper.KB


def _draw_ratios(
    axes: Axes,
    shape: ModelShape,
    roof: tuple[float, float],
    ratios: Sequence[float],
    place: tuple[bool, str],
) -> None:
    """Mark where a model's requests of the given κ stand on a roofline, named above or below."""
    (peak, rate), (above, marker) = roof, place
    flops_per_byte = 2.0 * shape.params_active / kv_bytes_per_token(shape)
    box = {"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none"}
    for ratio in ratios:
        x = flops_per_byte / ratio
        y = min(peak, rate * x)
        axes.plot(x, y, marker=marker, color="black", markersize=6, linestyle="none")
        axes.annotate(
            f"κ={ratio:g}", (x, y), xytext=(-6, 7) if above else (6, -13), bbox=box, fontsize=9,
            textcoords="offset points", ha="right" if above else "left",
        )  # fmt: skip

"""The rows of `kappa doctor --gpu`: the cost model fitted to them, sentences, a page with plots.

Pure: rows in, text out. The page stands alone, without scripts or anything from the network.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from html import escape
from itertools import groupby
from typing import Any

from matplotlib.figure import Figure

from kappa.cost import chunk_work
from kappa.plans.measured import fit_line, fit_steps
from kappa_loadtest.plots import COLOURS, logarithmic, picture

CPU_LABEL = "cpu (no GPU): the ladder's own check, not a GPU measurement"
"""The label of results without a GPU."""

Row = dict[str, Any]
Rows = Sequence[Row]
Bars = list[tuple[str, float]]
_WIDTH_IN = 10.5
_GB, _MS = 1e-9, 1e3
_STYLE = """
body { margin: 0 auto; padding: 1.5rem 1.25rem 4rem; max-width: 70rem; background: #fbfaf7;
  color: #24262b; font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .3rem; }
p, ul { margin: .3rem 0; } .soft { color: #666b75; font-size: .87rem; white-space: pre-wrap; }
.ok { color: #2f7d4f; } .failed, .out { color: #b3394b; }
figure { margin: .6rem 0; } svg { max-width: 100%; height: auto; }
"""


# -- the cost model -------------------------------------------------------------------------------


def predicted(rows: Rows) -> list[Row]:
    """The rows; those of TTFT with what the cost model says of them, and behind them its fit.

    Steps are fitted to what took no load (the prefix on the device), loads to the loads; the TTFT
    that they are held against is in neither fit. An engine that was ended early may have no fit.
    """
    found = [dict(row) for row in rows]
    for arm in {row["arm"]: 0 for row in rows if row["kind"] == "ttft"}:
        here = [row for row in found if row.get("arm") == arm]
        about = next(row for row in here if row["kind"] == "engine")
        try:
            fit = _fit([row for row in here if row["kind"] == "ttft"], about)
        except ValueError as error:
            fit = {"kind": "unfitted", "why": str(error)}
        found.append({"arm": arm, **fit})
    return found


def _fit(cells: Rows, about: Row) -> Row:
    works = [chunk_work(float(row["new"]), float(row["cached"])) for row in cells]
    fit = fit_steps(works, [row["compute_s"] for row in cells])
    cached = [row["cached"] for row in cells]
    load = fit_line("load", cached, [row["load_s"] for row in cells], relative=True)
    for row, work in zip(cells, works, strict=True):
        times = load.seconds(row["cached"]), float(fit.step.parts(work).step_s)
        row["modelled_share"] = times[0] / sum(times)
        # Of the longer all, of the shorter what the other does not hide.
        row["predicted_s"] = max(times) + about["serial_share"] * min(times)
        row["predicted_error"] = row["predicted_s"] / row["measured_s"] - 1.0
    errors = [abs(row["predicted_error"]) for row in cells]
    return {
        "kind": "fit", "step": fit.step.to_dict(), "step_r2": fit.r2,
        "load_token_s": load.per_token_s, "load_fixed_s": load.fixed_s, "load_r2": load.r2,
        "load_bytes_per_s": about["kv_bytes"] / load.per_token_s,
        "kappa_crit": fit.step.token_s / load.per_token_s,
        "median_error": statistics.median(errors), "most_error": max(errors),
    }  # fmt: skip


# -- a sentence a row -----------------------------------------------------------------------------


def sentences(rows: Rows) -> list[str]:
    """A rung's findings, line by line."""
    lines = [_SENTENCES[row["kind"]](row) for row in rows if row["kind"] in _SENTENCES]
    return [line for line in lines if line]


def _copy(r: Row) -> str:
    return f"{r['way']}, {r['layout']}: {r['bytes_per_s'] * _GB:.3g} GB/s" if r["largest"] else ""


def _fitted(r: Row) -> str:
    rate = f"loads at {r['load_bytes_per_s'] * _GB:.3g} GB/s"
    errors = f"within {r['median_error']:.0%} (median), {r['most_error']:.0%} (most)"
    return f"{r['arm']}: κ_crit {r['kappa_crit']:.3g}, {rate}, TTFT predicted {errors}"


def _compared(r: Row) -> str:
    return (
        f"{r['arm']} (tier {r['tier']}): {r['verdict']}; {r['cached_tokens']} of {r['tokens']} "
        f"tokens found; log-probabilities moved by {r['moved']:.2g} (recomputed "
        f"{r['noise']:.2g}, another prompt {r['control']:.2g})"
    )


def _policy(r: Row) -> str:
    # Only policies that are compared: neither the baseline nor a copy alone.
    if not r.get("speedup") or r["policy"] == r["baseline"]:
        return ""
    return f"{r['system']} {r['cell']}: {r['policy']} {r['speedup']:.2f} times {r['baseline']}"


def _ms(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds * _MS:.3g} ms"


_SENTENCES: Mapping[str, Callable[[Row], str]] = {
    "copy": _copy, "compare": _compared, "fit": _fitted, "policy": _policy,
    "product": lambda r: f"product of {r['tokens']} tokens: {r['flops_per_s'] / 1e12:.3g} TFLOP/s",
    "engine": lambda r: "; ".join(r.get("unmeasured", ())),
    "unfitted": lambda r: f"{r['arm']}: no fit: {r['why']}",
    "decode": lambda r: f"{r['arm']}, batch {r['batch']}: step {_ms(r['step_s'])}, "
    f"between tokens {_ms(r['between_tokens_s'])}",
    "burst": lambda r: f"{r['arm']}, loads {r['loads']}: TTFT {_ms(r['ttft_s'])} (longest "
    f"{_ms(r['ttft_most_s'])}), step {_ms(r['step_s'])} (longest {_ms(r['step_most_s'])})",
}  # fmt: skip


# -- plots ----------------------------------------------------------------------------------------


def _draw_copies(rows: Rows, figure: Figure) -> None:
    copies = [row for row in rows if row["kind"] == "copy"]
    figure.set_size_inches(_WIDTH_IN, 3.6)
    panels = figure.subplots(1, 2, sharey=True)
    ways = list(dict.fromkeys(row["way"] for row in copies))
    for axes, layout in zip(panels, ("whole", "blocks"), strict=True):
        for way, colour in zip(ways, COLOURS * 2, strict=False):
            line = [r for r in copies if r["layout"] == layout and r["way"] == way]
            axes.plot(
                [r["bytes"] / 1024 for r in line], [r["bytes_per_s"] * _GB for r in line],
                "--" if "pageable" in way else ":" if "vLLM" in way else "-", marker="o",
                markersize=3, color=colour, label=way,
            )  # fmt: skip
        axes.set(title=f"copies, {layout}", xlabel="KiB of one transfer")
        logarithmic(axes, "x")
        logarithmic(axes, "y")
    panels[0].set_ylabel("GB/s, each way")
    panels[1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))


def _draw_ttft(rows: Rows, figure: Figure) -> None:
    """Left, middle: the paper's Figures 5 and 6; right: predicted against measured."""
    cells = sorted((r for r in rows if r["kind"] == "ttft"), key=lambda r: (r["new"], r["cached"]))
    fits = [r for r in rows if r["kind"] == "fit"]
    figure.set_size_inches(_WIDTH_IN, 3.6)
    ratio, length, both = figure.subplots(1, 3)
    lines = groupby(cells, key=lambda r: r["new"])
    for colour, (new, group) in zip(COLOURS, lines, strict=False):
        here = list(group)
        share = [r["load_s"] / (r["load_s"] + r["compute_s"]) for r in here]
        xs = [r["cached"] for r in here]
        for axes, factor in ((ratio, new), (length, 1)):
            axes.plot(
                [x / factor for x in xs], share, "o", markersize=4, color=colour, label=f"{new} new"
            )
            if fits:
                modelled = [r["modelled_share"] for r in here]
                axes.plot([x / factor for x in xs], modelled, "-", linewidth=1, color=colour)
        if fits:
            both.plot([r["measured_s"] * _MS for r in here], [r["predicted_s"] * _MS for r in here],
                      "o", markersize=4, color=colour)  # fmt: skip
    for axes in (ratio, length):
        axes.set(ylim=(0, 1.03))
        logarithmic(axes, "x")
    for fit in fits:
        ratio.axvline(fit["kappa_crit"], color=COLOURS[7], linestyle=":")
        ratio.annotate(f" κ_crit {fit['kappa_crit']:.3g}", (fit["kappa_crit"], 0.02), fontsize=8)
        ends = [r[key] * _MS for r in cells for key in ("measured_s", "predicted_s")]
        both.plot([min(ends), max(ends)], [min(ends), max(ends)], color=COLOURS[7], linewidth=0.8)
        logarithmic(both, "x")
        logarithmic(both, "y")
    ratio.set(title=f"{cells[0]['arm']}: load's share of both", xlabel="κ = cached / new")
    length.set(title="the same by length", xlabel="cached tokens")
    both.set(title="TTFT, ms", xlabel="measured", ylabel="by the cost model")
    length.legend(fontsize=8)


def _draw_bars(groups: Mapping[str, Bars], figure: Figure) -> None:
    """A panel a group, two a line; a bar a name."""
    lines, most = -(-len(groups) // 2), max(len(bars) for bars in groups.values())
    figure.set_size_inches(_WIDTH_IN, lines * (0.9 + 0.24 * most))
    panels = figure.subplots(lines, min(len(groups), 2), squeeze=False).flatten()
    for axes, (name, bars) in zip(panels, groups.items(), strict=False):
        axes.barh(range(len(bars)), [value for _, value in bars], color=COLOURS[0], height=0.6)
        axes.set_yticks(range(len(bars)), [label for label, _ in bars], fontsize=8)
        axes.set(title=name, ylim=(len(bars) - 0.4, -0.6))
        axes.grid(axis="y", visible=False)
    for axes in panels[len(groups) :]:
        axes.remove()


def _bars(rows: Rows) -> dict[str, Bars]:
    """The bars by panel; an unknown figure has none."""
    panels: dict[str, Bars] = {}
    for r in rows:
        seconds: dict[str, float | None] = {}
        if r["kind"] == "decode":
            seconds = {"decoding step": r["step_s"], "between tokens": r["between_tokens_s"]}
            label = f"{r['arm']}, batch {r['batch']}"
        elif r["kind"] == "burst":
            seconds = {"TTFT, median": r["ttft_s"], "longest step beside it": r["step_most_s"]}
            label = f"{r['arm']}, loads {r['loads']}"
        elif r["kind"] == "policy" and r.get("speedup"):
            panel = panels.setdefault(f"{r['system']} {r['cell']}, times as fast", [])
            panel.append((r["policy"], r["speedup"]))
        for name, took_s in seconds.items():
            if took_s is not None:
                panels.setdefault(f"{name}, ms", []).append((label, took_s * _MS))
    return panels


def pictures(name: str, rows: Rows) -> list[str]:
    """The pictures of a rung, as SVG."""
    draws: list[Callable[[Figure], None]] = []
    if any(row["kind"] == "copy" for row in rows):
        draws.append(partial(_draw_copies, rows))
    for arm in {row["arm"]: 0 for row in rows if row["kind"] == "ttft"}:
        draws.append(partial(_draw_ttft, [row for row in rows if row.get("arm") == arm]))
    if groups := _bars(rows):
        draws.append(partial(_draw_bars, groups))
    return [picture(f"{name}{number}", draw, name) for number, draw in enumerate(draws)]


# -- the page -------------------------------------------------------------------------------------


def page(result: Mapping[str, Any]) -> str:
    """One page of HTML: what it was measured on, then rung by rung."""
    known, title = result["facts"], f"Ladder of {result['date']}: {result['device']}"
    gpus = [f"{gpu['name']} (driver {gpu['driver']})" for gpu in known["machine"]["gpus"] or ()]
    versions = ", ".join(f"{name} {version}" for name, version in known["versions"].items())
    about = (
        f"GPUs: {', '.join(gpus) or 'none'}; CUDA {known['cuda']}; {versions}; "
        f"{result['machine']}; {result['total_s']:.0f} s in all; model: {result['model']}"
    )
    label = [f"<p class=failed>{CPU_LABEL}</p>"] if result["device"] == CPU_LABEL else []
    parts = [f"<h1>{escape(title)}</h1>", *label, f"<p class=soft>{escape(about)}</p>"]
    for rung in result["rungs"]:
        parts += _rung(rung)
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title>"
        f"<style>{_STYLE}</style>{''.join(parts)}</html>\n"
    )


def _rung(rung: Row) -> Iterable[str]:
    status = rung["status"]
    yield f"<h2>{rung['rung']}: <span class={status.split()[0]}>{status}</span></h2>"
    yield f"<p class=soft>{escape(rung['what'])}; {rung['seconds']:.1f} s</p>"
    yield from (f"<p class=soft>{escape(why)}</p>" for why in rung["why"])
    yield from (f"<figure>{drawn}</figure>" for drawn in pictures(rung["rung"], rung["rows"]))
    items = "".join(f"<li>{escape(one)}</li>" for one in sentences(rung["rows"]))
    yield f"<ul>{items}</ul>"

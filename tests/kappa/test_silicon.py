"""The cost law against step times of real GPUs, which nobody here made; and their reader.

Goals stand beside what is reached; where that is worse, the test holds what is reached.
`python -m tests.kappa.test_silicon` prints the tables of docs/silicon.md.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

from kappa.cost import (
    StepLimit,
    StepModel,
    StepWork,
    TokenCounts,
    batch_work,
    chunk_work,
    decode_work,
    idle_cost,
    kappa_crit,
    load_token_s,
    step_model,
)
from kappa.hardware import REACHED, node_profile
from kappa.plans.measured import fit_steps
from kappa.shapes import model_shape
from kappa.silicon import (
    DATA,
    SYSTEMS,
    SiliconTable,
    silicon_figures,
    silicon_names,
    silicon_node,
    silicon_of,
    silicon_shape,
    silicon_table,
)
from kappa_scheduler.config import FairConfig

_MIXED_CONTEXT = 2048
KINDS = "prefill", "decode", "mixed"


class Steps(NamedTuple):
    """Steps of tables: their work, seconds and kinds."""

    works: list[StepWork[float]]
    seconds: np.ndarray
    kinds: np.ndarray

    def half(self, odd: int) -> Steps:
        """Every other one of a random order."""
        return self.some(np.random.default_rng(38).permutation(len(self.works))[odd::2])

    def some(self, places: np.ndarray) -> Steps:
        return Steps([self.works[i] for i in places], self.seconds[places], self.kinds[places])


def steps_of(name: str) -> Steps:
    """Every step that the table has."""
    with np.load(DATA) as data:
        axes = {axis: data[axis].astype(float) for axis in ("new", "cached", "batch", "context")}
        few = data["mixed_batch"].astype(float)
        table = {kind: 1e-3 * data[f"{name}/{kind}"].astype(float) for kind in KINDS}
    works: list[StepWork[float]] = []
    seconds, kinds = [], []
    made = {
        "prefill": [[chunk_work(n, c) for c in axes["cached"]] for n in axes["new"]],
        "decode": [[decode_work(b, b * c) for c in axes["context"]] for b in axes["batch"]],
        "mixed": [[batch_work([(n, 0)], b, b * _MIXED_CONTEXT) for b in few] for n in axes["new"]],
    }
    for kind, rows in made.items():
        for row, line in zip(rows, table[kind], strict=True):
            for work, second in zip(row, line, strict=True):
                if np.isfinite(second):
                    works.append(StepWork(*map(float, work)))
                    seconds.append(float(second))
                    kinds.append(kind)
    return Steps(works, np.array(seconds), np.array(kinds))


def errors(step: StepModel, steps: Steps) -> np.ndarray:
    """|predicted / true - 1| in percent."""
    predicted = np.array([step.work_s(work) for work in steps.works])
    return 100 * np.abs(predicted / steps.seconds - 1)


def pooled(names: Sequence[str]) -> tuple[float, float]:
    """Median and 90th percentile over all steps of these tables, by the catalogue's figures."""
    found = np.concatenate([errors(silicon_table(name).law, steps_of(name)) for name in names])
    return float(np.median(found)), float(np.quantile(found, 0.9))


def named(*, system: str = "", kind: str = "", of: str = "") -> list[str]:
    """Tables of a system, of dense models or mixtures, of Llama-3.1-8B or of others."""
    names = [name for name in silicon_names() if "fp8" not in name]
    names = [name for name in names if name.startswith(system)]
    names = [name for name in names if not kind or (kind == "mixture") == ("a3b" in name)]
    return [name for name in names if not of or (of == "own") == ("llama-3.1-8b" in name)]


# -- what the law reaches with one set of figures for each GPU ------------------------------------


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_catalogue_has_what_was_fitted_to_llama_8b(system: str) -> None:
    steps, node = steps_of(f"{system}/llama-3.1-8b/tp1"), node_profile(SYSTEMS[system])
    found = fit_steps(steps.works, steps.seconds, host=False).step
    law = step_model(model_shape("llama-3.1-8b"), node)
    names = ("token_s", "pair_s", "weights_s", "context_token_s", "exposed")
    for name in names:
        assert getattr(law, name) == pytest.approx(getattr(found, name), rel=0.01), name
    assert law.fixed_s == found.fixed_s == 0.0
    assert all(getattr(node, name) > 0 for name in REACHED)


def test_law_is_within_5_and_15_percent_of_the_fitted_models() -> None:
    median, p90 = pooled(named(kind="dense", of="own"))
    assert median <= 5 and p90 <= 15


# Goal: 6 and 15.
@pytest.mark.parametrize(("system", "most", "most_p90"), [
    ("h100_sxm", 6, 16), ("h200_sxm", 6, 15), ("a100_sxm", 6, 15), ("gb200", 6.7, 19),
    ("l40s", 6, 15),
])  # fmt: skip
def test_other_dense_models_of_the_gpu(system: str, most: float, most_p90: float) -> None:
    median, p90 = pooled(named(system=system, kind="dense", of="others"))
    assert median <= most and p90 <= most_p90


@pytest.mark.parametrize("system", SYSTEMS)
def test_mixtures_of_the_gpu_are_within_20_percent_in_the_middle(system: str) -> None:
    assert pooled(named(system=system, kind="mixture"))[0] <= 20


def test_law_is_within_10_and_31_percent_of_mixtures() -> None:
    # Goal: 10 and 25.
    median, p90 = pooled(named(kind="mixture"))
    assert median <= 10 and 25 < p90 <= 31


def test_products_in_eight_bits_are_far_off() -> None:
    # Too fast: small products in blocks of FP8 wait for their launch, which the law has not.
    median, p90 = pooled(["h100_sxm/qwen3-32b-fp8/tp2"])
    assert 50 < median < 52 and p90 < 71


# -- what a fit reaches on the other half of a table ----------------------------------------------


@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_a_fit_to_half_of_the_steps_holds_the_other_half(kind: str) -> None:
    found: dict[str, list[np.ndarray]] = {each: [] for each in KINDS}
    for name in named(kind=kind):
        steps = steps_of(name)
        idle = silicon_table(name).law.expert_idle
        learnt, unseen = steps.half(0), steps.half(1)
        fit = fit_steps(learnt.works, learnt.seconds, idle, host=False).step
        off = errors(fit, unseen)
        for each in KINDS:
            found[each].append(off[unseen.kinds == each])
    for each, goal in FIT_GOALS[kind].items():
        off = np.concatenate(found[each])
        assert np.median(off) <= goal[0], each
        assert np.quantile(off, 0.9) <= goal[1], each


@pytest.mark.parametrize("name", named())
def test_what_is_learnt_below_8k_of_context_holds_behind_32k(name: str) -> None:
    steps = steps_of(name)
    behind = np.array([work.reads - work.tokens for work in steps.works])
    short = (steps.kinds == "decode") & (behind <= 8192 * np.array([w.tokens for w in steps.works]))
    learnt = np.flatnonzero(short | ((steps.kinds == "prefill") & (behind <= 8192)))
    unseen = np.flatnonzero((steps.kinds == "prefill") & (behind >= 32768))
    fit = fit_steps(
        [steps.works[i] for i in learnt], steps.seconds[learnt],
        silicon_table(name).law.expert_idle, host=False,
    ).step  # fmt: skip
    off = errors(fit, steps.some(unseen))
    # Goal: 12 for what the router learns.
    assert np.median(off) <= (15 if name == "l40s/qwen3-32b/tp2" else 12)


# Goal: 4 and 12 dense, 8 and 25 mixtures.
FIT_GOALS = {
    "dense": {"prefill": (4, 12), "decode": (4, 12), "mixed": (4.4, 12)},
    "mixture": {"prefill": (8, 25), "decode": (8, 25), "mixed": (8, 25)},
}


# -- the threshold --------------------------------------------------------------------------------

THRESHOLDS = {
    "h100_sxm/llama-3.1-8b/tp1": 54e9,
    "h100_sxm/llama-3.1-70b/tp4": 54e9,
    "h100_sxm/qwen3-30b-a3b/tp1": 54e9,
    "a100_sxm/qwen3-30b-a3b/tp1": 25e9,
    "gb200/qwen3-30b-a3b/tp1": 172e9,
    "l40s/qwen3-30b-a3b/tp1": 25e9,
}
"""Tables, and bytes/s that a link to the host sustains for each GPU."""
_THRESHOLD_NEW = 256, 512, 2048, 8192


def thresholds(name: str) -> tuple[float, list[float], list[float]]:
    """Paper 001's constant, and κ_crit of `_THRESHOLD_NEW` new tokens by table and by law."""
    table, shape, node = silicon_table(name), silicon_shape(name.split("/")[1]), silicon_node(name)
    node = replace(node, h2d_bytes_per_s=THRESHOLDS[name] * node.gpus, load_fixed_s=0.0)
    token_s = load_token_s(shape, node)
    constant = 2 * shape.params_active / node.flops_per_s / token_s
    counts = [TokenCounts(0, 0, new) for new in _THRESHOLD_NEW]
    real = [kappa_crit(c, 0.0, table.step_s([(c.new_tokens, 0)]), token_s) for c in counts]
    return constant, real, [idle_cost(each, shape, node).kappa_crit for each in counts]


@pytest.mark.parametrize("name", THRESHOLDS)
def test_kappa_crit_by_the_law_is_that_of_silicon(name: str) -> None:
    constant, real, law = thresholds(name)
    assert law == pytest.approx(real, rel=0.3)
    assert min(real) > 1.1 * constant


# -- steps bounded in seconds (ADR 0146) ----------------------------------------------------------

DECODING = 1, 8, 32, 128
# Goals: 4 decode steps, 1.15 times the best chunk's. What is not held, by table and requests.
LONGER = {
    ("a100_sxm/qwen3-30b-a3b/tp1", 1): 16.4, ("a100_sxm/qwen3-30b-a3b/tp1", 8): 5.3,
    ("gb200/qwen3-30b-a3b/tp1", 1): 10.7,
    ("h100_sxm/qwen3-30b-a3b/tp1", 1): 12.0, ("h100_sxm/qwen3-30b-a3b/tp1", 8): 4.2,
    ("h200_sxm/qwen3-30b-a3b/tp1", 1): 10.2,
    ("l40s/qwen3-30b-a3b/tp1", 1): 30.7, ("l40s/qwen3-30b-a3b/tp1", 8): 4.5,
}  # fmt: skip
DEARER = {
    ("a100_sxm/qwen3-30b-a3b/tp1", 8): 1.17, ("a100_sxm/qwen3-32b/tp2", 128): 1.25,
}  # fmt: skip


def bounded(table: SiliconTable, step: StepModel, few: int) -> tuple[float, float]:
    """Of a step bounded by `step` in which `few` requests decode: how many times as long it lasts
    as without its prompt, and what a token of the prompt adds over the best chunk's."""
    context = few * _MIXED_CONTEXT
    tokens = int(StepLimit(step, FairConfig().step_factor).tokens(few, context)) - few
    alone_s = table.step_s([], few, context)
    both_s = table.step_s([(tokens, 0)], few, context)
    best_s = min(table.step_s([(int(new), 0)]) / new for new in table.new)
    return both_s / alone_s, (both_s - alone_s) / tokens / best_s


@pytest.mark.parametrize("few", DECODING)
@pytest.mark.parametrize("name", silicon_names())
def test_a_bounded_step_is_neither_long_nor_dear(name: str, few: int) -> None:
    table = silicon_table(name)
    times, dearness = bounded(table, table.law, few)
    assert times <= LONGER.get((name, few), 4), "decode steps"
    assert dearness <= DEARER.get((name, few), 1.15), "of the best chunk's"


@pytest.mark.parametrize(("name", "few"), LONGER)
def test_what_is_longer_could_hardly_be_shorter(name: str, few: int) -> None:
    # A prompt reads all experts, of which one that decodes reads a sixteenth: where a token is to
    # cost at most 1.15 times the best, no step is as short as 4; on H100 beside 8 few are.
    table, context = silicon_table(name), few * _MIXED_CONTEXT
    best_s = min(table.step_s([(int(new), 0)]) / new for new in table.new)
    alone_s = table.step_s([], few, context)
    for tokens in range(128, 8192, 128):
        both_s = table.step_s([(tokens, 0)], few, context)
        if (both_s - alone_s) / tokens <= 1.15 * best_s:
            break
    assert (both_s / alone_s > 4) == ((name, few) != ("h100_sxm/qwen3-30b-a3b/tp1", 8))


@pytest.mark.parametrize("name", named())
def test_a_fit_with_a_fixed_cost_bounds_steps_as_well(name: str) -> None:
    # A profile's fit calls up to 18 ms of weight reads fixed.
    table, steps = silicon_table(name), steps_of(name)
    fit = fit_steps(steps.works, steps.seconds, table.law.expert_idle).step
    for few in (32, 128):
        times, dearness = bounded(table, fit, few)
        assert times <= 4 and dearness <= DEARER.get((name, few), 1.15)


# -- the reader -----------------------------------------------------------------------------------

TABLE = "h100_sxm/llama-3.1-8b/tp1"


@pytest.mark.parametrize(
    ("chunks", "requests", "context", "milliseconds"),
    [
        ([(2048, 0)], 0, 0, 43.51),
        ([(512, 16384)], 0, 0, 18.04),
        ([], 32, 32 * 2048, 9.63),
        # Half way between 512 and 768 tokens, 12.02 and 16.66 ms.
        ([(640, 0)], 0, 0, 14.34),
        ([], 0, 0, 0.0),
    ],
)
def test_a_step_is_what_the_table_says(chunks, requests, context, milliseconds) -> None:
    table = silicon_table(TABLE)
    found = table.step_s(chunks, requests, context)
    assert 1e3 * found == pytest.approx(milliseconds, abs=0.01)


def test_a_step_of_both_is_made_of_its_parts() -> None:
    # Products of 513 + 31 tokens, attention of a prompt and of those that decode.
    steps, table = steps_of(TABLE), silicon_table(TABLE)
    with np.load(DATA) as data:
        mixed = 1e-3 * data[f"{TABLE}/mixed"]
    for row, new in enumerate(table.new):
        for column, few in enumerate((1, 8, 32, 128)):
            if new + few <= table.new[-1]:
                found = table.step_s([(int(new), 0)], few, few * _MIXED_CONTEXT)
                assert found == pytest.approx(mixed[row, column], rel=0.09)
    assert len(steps.works) == 152 + 75 + 76


def test_table_goes_on_by_the_law_beyond_its_points_and_says_so() -> None:
    table = SiliconTable(**{**vars(silicon_table(TABLE)), "beyond": set()})
    inside = table.step_s([(8192, 0)])
    assert table.beyond == set()
    # Twice the tokens take twice the products, and four times the pairs.
    own, attention = inside - table.prefill_attention[-1, 0], table.prefill_attention[-1, 0]
    law = table.law
    more = (16384 * law.token_s + law.exposed * law.weights_s) / (
        8192 * law.token_s + law.exposed * law.weights_s
    )
    assert table.step_s([(16384, 0)]) == pytest.approx(own * more + 4 * attention, rel=1e-3)
    assert table.beyond == {"products", "attention of prompts"}
    # 256 requests over more context than any of the table's, which ends at 4,096 each there.
    longer = table.step_s([], 256, 256 * 8192)
    assert longer == pytest.approx(2 * table.step_s([], 256, 256 * 4096), rel=0.25)
    assert "attention of those that decode" in table.beyond


def test_real_seconds_are_the_tables_with_the_hosts_dilated() -> None:
    table, host = silicon_table(TABLE), replace(node_profile("pcie"), step_fixed_s=2e-3)
    paced = table.on(replace(host, source="paced", dilation=30.0))
    # A prompt's chunk behind 1,000 tokens, the first token of another, and two that decode.
    chunks = [(512, 1000), (1, 0), (1, 3000), (1, 5000)]
    expected = table.step_s([(512, 1000), (1, 0)], 2, 8000)
    assert paced.real_s(chunks) == pytest.approx(30 * (expected + 2e-3))
    assert paced.real_s([]) == 0.0


def test_sums_over_gpus_are_the_tables_alone() -> None:
    name = "h100_sxm/llama-3.1-70b/tp4"
    node = replace(node_profile("pcie"), **silicon_figures(name))
    assert (node.gpus, node.silicon, node.h2d_bytes_per_s) == (4, name, 55e9)
    table = silicon_table(name)
    # The law of the node has fixed seconds of each sum, which the table has measured.
    assert step_model(model_shape("llama-3.1-70b"), node).fixed_s > 0
    assert table.on(node).real_s([(2048, 0)]) == table.step_s([(2048, 0)])


def test_a_table_of_another_model_is_refused_with_its_own() -> None:
    shape = model_shape("llama-3.1-70b")
    with pytest.raises(ValueError, match=rf"{TABLE} is a table of another model than llama-3.1-70b"
                       r": choose one of its own \(a100_sxm/llama-3.1-70b/tp4, .*\)"):  # fmt: skip
        silicon_of(shape, TABLE)
    with pytest.raises(ValueError, match=r"than gemma-3-27b: it has none, so name no table"):
        silicon_of(model_shape("gemma-3-27b"), TABLE)


@pytest.mark.parametrize("chunks, requests, context", [
    ([(float("nan"), 0)], 0, 0), ([(1, float("inf"))], 0, 0), ([], 1, -1.0), ([], -1, 0.0),
])  # fmt: skip
def test_a_step_that_is_no_step_is_refused(chunks, requests, context) -> None:
    with pytest.raises(ValueError, match=r"a step of .* tokens: give finite counts, zero or more"):
        silicon_table(TABLE).step_s(chunks, requests, context)


@pytest.mark.parametrize("name", ["h100_sxm/llama-3.1-8b/tp2", "l4/llama-3.1-8b/tp1", "h100"])
def test_unknown_table_is_refused_with_those_that_are_known(name: str) -> None:
    with pytest.raises(ValueError, match=rf"no table of silicon named '{name}'.*{TABLE}"):
        silicon_table(name)


def changed(path, **arrays):
    with np.load(DATA) as data:
        kept = {key: data[key] for key in data.files}
    np.savez(path, **{k: v for k, v in {**kept, **arrays}.items() if v is not None})
    return path


def test_a_table_with_a_hole_is_refused_by_its_place(tmp_path) -> None:
    with np.load(DATA) as data:
        prefill = data[f"{TABLE}/prefill"].copy()
    prefill[3, 2] = np.nan
    path = changed(tmp_path / "hole.npz", **{f"{TABLE}/prefill": prefill})
    with pytest.raises(ValueError, match=r"hole in prefill at new 32, cached 2048: derive it"):
        silicon_table(TABLE, path)
    path = changed(tmp_path / "part.npz", **{f"{TABLE}/decode": None})
    with pytest.raises(ValueError, match=r"has no decode of \(9, 10\): derive the tables again"):
        silicon_table(TABLE, path)


@pytest.mark.parametrize("content", [b"", b"PK", json.dumps({"a": 1}).encode()])
def test_a_file_that_holds_no_tables_is_refused(tmp_path, content: bytes) -> None:
    path = tmp_path / "other.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"other\.npz: no tables of silicon can be read"):
        silicon_table(TABLE, path)
    with pytest.raises(ValueError, match=r"none\.npz: no tables of silicon can be read"):
        silicon_table(TABLE, tmp_path / "none.npz")


def main() -> None:
    """The tables of docs/silicon.md."""
    for name in THRESHOLDS:
        constant, *found = thresholds(name)
        cells = [f"{real:.3g}, {law:.3g}" for real, law in zip(*found, strict=True)]
        print(f"| {name} | {constant:.3g} | {' | '.join(cells)} |")
    print("| table | prefill | decode | mixed | all |\n|---|--:|--:|--:|--:|")
    for name in silicon_names():
        steps = steps_of(name)
        off = errors(silicon_table(name).law, steps)
        chosen = [*(off[steps.kinds == kind] for kind in KINDS), off]
        cells = [f"{np.median(each):.1f} / {np.quantile(each, 0.9):.1f}" for each in chosen]
        print(f"| {name} | {' | '.join(cells)} |")
    for label, names in (
        ("own", named(kind="dense", of="own")), ("mixtures", named(kind="mixture")),
        *((f"others of {s}", named(system=s, kind="dense", of="others")) for s in SYSTEMS),
    ):  # fmt: skip
        print(label, "{:.1f} / {:.1f}".format(*pooled(names)))
    print("\nbounded steps: decode steps that one lasts, and a prompt token over the best chunk's")
    for name in silicon_names():
        table = silicon_table(name)
        found = [bounded(table, table.law, few) for few in DECODING]
        print(f"| {name} |", " | ".join(f"{times:.1f}, {dear:.2f}" for times, dear in found), "|")


if __name__ == "__main__":
    main()

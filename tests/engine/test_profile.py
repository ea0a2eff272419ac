"""The profile: what it holds, that planners take or refuse it, when it is measured again."""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kappa.plans.decoding import attention_refused
from kappa.plans.measured import fit_line, rates_from_measured
from kappa.plans.planners import choose
from kappa.plans.rates import LEAST_R2
from kappa.plans.split import Costs
from kappa_engine.config import read_config
from kappa_engine.forward import Forward
from kappa_engine.kv_cache import Arena, ArenaSize
from kappa_engine.peaks import device_name, repeating
from kappa_engine.profile import ProfileSettings, cached_profile, profile
from kappa_engine.step import Pages, Source, StepRow, TokenSpan
from kappa_engine.transfer import CpuMover, TransferFailed
from kappa_engine.weights import random_weights
from tests.engine.books import no_thread_left
from tests.engine.links import Link

SETTINGS = ProfileSettings(
    tokens=(16, 32, 64, 128), new_tokens=(1, 16, 64), context_tokens=(0, 32),
    decode_sequences=(1, 4), decode_tokens=(0, 64, 1024), repeats=3,
)  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "opt": {"ffn_dim": 96, "num_attention_heads": 4},
    "llama": {"intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 2},
}


@contextmanager
def forward(
    family: str = "opt",
    *,
    blocks: int = 16,
    mover: CpuMover | None = None,
    cpu_threads: int = 0,
    activations: int = 0,
) -> Iterator[Forward]:
    config = read_config(
        {
            "model_type": family, "vocab_size": 96, "num_hidden_layers": 3, "hidden_size": 64,
            "max_position_embeddings": 512, "torch_dtype": "float32", **FAMILIES[family],
        },
        f"tiny-{family}",
    )  # fmt: skip
    weights = random_weights(config, seed=1, dtype=torch.float32)
    arena = Arena(
        config.shape,
        ArenaSize(blocks, blocks, activations, activations, block_tokens=8),
        dtype=torch.float32,
    )
    mover = mover or CpuMover()
    made = Forward(weights, arena, mover, cpu_threads=cpu_threads)
    try:
        yield made
    finally:
        made.close()
        mover.stop()
        arena.close()


@cache
def _profiled(family: str) -> str:
    with forward(family) as made:
        return json.dumps(profile(made, SETTINGS))


def profiled(family: str = "opt", straight: bool = False) -> dict[str, Any]:
    """A profile, as it is kept; its two lines made straight."""
    measured: dict[str, Any] = json.loads(_profiled(family))
    if straight:
        straighten(measured)
    return measured


def straighten(measured: dict[str, Any]) -> None:
    """Put in the seconds of a quiet machine: a busy one may give no line that fits."""
    for key, slope in (("load", 2e-6), ("project", 1e-6)):
        measured[key]["seconds"] = [slope * n + 1e-5 for n in measured[key]["tokens"]]
    grid = measured["grid"]
    grid["seconds"] = [
        [1e-5 * new + 1e-7 * context + 1e-4 for context in grid["context_tokens"]]
        for new in grid["new_tokens"]
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_profile_is_what_planners_read(family: str) -> None:
    with no_thread_left():
        measured = profiled(family)
    assert measured["device"] == device_name(torch.device("cpu"))
    assert measured["load"]["tokens"] == [16, 32, 64, 128]
    assert min(measured["load"]["seconds"] + measured["project"]["seconds"]) > 0
    assert measured["grid"]["new_tokens"] == [1, 16, 64]
    assert measured["grid"]["context_tokens"] == [0, 32]
    assert measured["h2d_bytes_per_s"] > 0
    heads, width = {"opt": (4, 16), "llama": (2, 8)}[family]
    assert measured["kv_bytes_per_token"] == 3 * 2 * heads * width * 4
    assert measured["activation_bytes_per_token"] == 3 * 64 * 4
    # At such sizes, on a busy machine, a line may be poor: then, and only then, it is refused.
    poor = []
    for key in ("load", "project"):
        try:
            fit = fit_line(key, measured[key]["tokens"], measured[key]["seconds"])
            poor += [key] if fit.r2 < LEAST_R2 else []
        except ValueError:
            poor.append(key)
    if poor:
        with pytest.raises(ValueError, match=r"fit has|shows what computing a token takes"):
            rates_from_measured(measured)
        return
    straighten(measured)
    plan = choose(Costs(rates_from_measured(measured), 64, 8), block_tokens=8)
    assert plan.cached_tokens == 64 and plan.ttft_s > 0


def test_a_profile_of_straight_lines_is_planned_with() -> None:
    measured = profiled(straight=True)
    rates = rates_from_measured(measured)
    assert rates.activation_ratio == 0.5
    assert rates.load_token_s == pytest.approx(3 * 2e-6)
    assert rates.prefill_s(16, 32) == pytest.approx(measured["grid"]["seconds"][1][1])


def test_decode_grid_is_measured_to_the_last_position_and_beyond() -> None:
    measured = profiled(straight=True)
    grid = measured["decode"]
    assert (grid["sequences"], grid["resident_tokens"]) == ([1, 4], [0, 64, 1024])
    # One sequence has no 1,024 positions; four of 256 have.
    assert grid["measured"] == [2, 3]
    first = grid["seconds"][0]
    slope = max(0.0, (first[1] - first[0]) / 64)
    assert first[2] == pytest.approx(first[1] + slope * 960)
    rates = rates_from_measured(measured)
    for index, count in enumerate((1, 4)):
        predicted = rates.decode_gpu_s(count, 64 / count)
        assert predicted == pytest.approx(grid["seconds"][index][1])
    no_grid = rates_from_measured({k: v for k, v in measured.items() if k != "decode"})
    assert no_grid.decode is None and no_grid.decode_gpu_s(4, 16) > 0


def test_profile_measures_steps_behind_activations_if_it_keeps_any() -> None:
    assert {"from_kv", "from_acts"}.isdisjoint(profiled())
    with forward(activations=4) as made:
        measured = profile(made, SETTINGS)
    straighten(measured)
    for name in ("from_kv", "from_acts"):
        assert measured[name]["sequences"] == [1, 4] and measured[name]["measured"] == [2, 3]
    rates = rates_from_measured(measured)
    assert rates.from_kv is not None and rates.from_acts is not None
    four_s = [measured[name]["seconds"][1][1] for name in ("from_kv", "from_acts")]
    assert rates.decode_s(4, 16)[1] == pytest.approx(four_s[0])
    assert rates.decode_s(4, 16, 16)[1] == pytest.approx(max(four_s))


def test_landed_contexts_do_not_cross() -> None:
    with forward(activations=4) as made:
        pages = Pages(np.array([-1, -1, 0]))
        pages.put(0, "kv", "host", np.arange(2))
        spans = TokenSpan(Source.KV_HOST, 0, 16), TokenSpan(Source.NEW, 16, 17)
        row = StepRow([5], spans, pages)
        before = made.mover.counters["h2d"].copied_bytes
        with made.landed():
            assert made.compute([row]).isfinite().all()
        assert made.mover.counters["h2d"].copied_bytes == before
        made.compute([row])
        made.mover.drain()
        assert made.mover.counters["h2d"].copied_bytes > before


def test_profile_measures_cpu_attention_when_it_has_threads() -> None:
    with no_thread_left(), forward("llama", cpu_threads=1) as made:
        measured = profile(made, SETTINGS)
    found = measured["attend"]
    assert found["tokens"] == [16, 32, 64, 128] and min(found["seconds"]) > 0
    assert found["threads"] == measured["cpu_threads"] == 1
    assert found["h2d_bytes_per_s"] > 0 and found["share_while_loading"] > 0
    straighten(measured)
    for line in (measured["load"], found):
        line["seconds"] = [1e-6 * n + 1e-5 for n in line["tokens"]]
    found["h2d_bytes_per_s"] = 0.5 * measured["h2d_bytes_per_s"]
    found["share_while_loading"] = 0.8
    rates = rates_from_measured(measured)
    assert rates.attend_bytes_per_s == pytest.approx(rates.kv_bytes / 3e-6)
    assert (rates.h2d_attending, rates.attend_loading) == (0.5, 0.8)
    busy = rates.attending()
    assert busy.load_token_s == pytest.approx(2 * rates.load_token_s)
    assert attention_refused(rates) == ""
    # A line that says nothing counts as none; the rest is as good as it was.
    found["seconds"] = [1e-5, 1e-6, 1e-5, 1e-6]
    assert rates_from_measured(measured).attend is None
    assert "attend" not in profiled()


def test_sizes_that_the_arena_cannot_hold_are_left_out() -> None:
    with forward(blocks=8) as made:
        measured = profile(made, SETTINGS)
    assert measured["load"]["tokens"] == [16, 32, 64]
    assert measured["grid"]["new_tokens"] == [1, 16]


def test_an_arena_too_small_or_in_use_is_refused() -> None:
    with forward(blocks=4) as made, pytest.raises(ValueError, match="the arena holds 32 tokens"):
        profile(made, SETTINGS)
    with forward() as made:
        made.arena.pools["kv", "host"].allocate(1)
        with pytest.raises(ValueError, match=r"in use \(host kv\): profile before serving"):
            profile(made, SETTINGS)


def test_a_link_that_fails_fails_the_measurement() -> None:
    link = Link()
    link.breaks = lambda direction, copies: direction == "h2d"
    with (
        no_thread_left(), forward(mover=link) as made,
        pytest.raises(TransferFailed, match="the link is down"),
    ):  # fmt: skip
        profile(made, SETTINGS)


SMALL = ProfileSettings((16, 32, 64), (1, 16), (0, 32), (), (), 1)


def test_profile_is_cached_by_device_model_dtype_and_settings(tmp_path: Path) -> None:
    with forward("opt") as made:
        first = cached_profile(made, tmp_path, SMALL)
        assert cached_profile(made, tmp_path, SMALL) == first
        assert b"torch_version" not in pickle.dumps(first), "deciders have no torch to read it with"
        other = ProfileSettings((16, 32, 128), (1, 16), (0, 32), (), (), 1)
        assert cached_profile(made, tmp_path, other)["load"]["tokens"] == [16, 32, 128]
    with forward("llama") as made:
        assert cached_profile(made, tmp_path, SMALL)["model"] == "tiny-llama"
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"] * 3


def test_a_garbled_file_is_measured_anew(tmp_path: Path) -> None:
    with forward() as made:
        first = cached_profile(made, tmp_path, SMALL)
        (path,) = tmp_path.iterdir()
        for content in ("[1", "[1]", '{"format": "other"}'):
            path.write_text(content, encoding="utf-8")
            again = cached_profile(made, tmp_path, SMALL)
            assert again["load"]["tokens"] == first["load"]["tokens"]
            assert json.loads(path.read_text(encoding="utf-8")) == again


def _fail() -> None:
    raise OSError("no")


def test_what_repeats_runs_in_the_block_and_is_over_after_it() -> None:
    done: list[int] = []
    with no_thread_left():
        with repeating(lambda: done.append(threading.get_ident())):
            assert len(set(done)) == 1 and threading.get_ident() not in done
        count = len(done)
        with pytest.raises(KeyError), repeating(lambda: None):
            raise KeyError  # of the measured block: its own
    assert len(done) == count


def test_repeating_raises_a_failure_before_or_after_its_block() -> None:
    entered, first, second = [], threading.Event(), threading.Event()
    with pytest.raises(RuntimeError, match="beside the measurement failed: no"), repeating(_fail):
        entered.append(1)
    assert entered == []

    def action() -> None:
        if first.is_set():
            second.set()
            _fail()

    with pytest.raises(RuntimeError, match="beside the measurement failed: no"), repeating(action):
        first.set()
        assert second.wait(10)

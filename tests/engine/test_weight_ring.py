"""Weights in host memory: Hugging Face's logits whatever crosses, once a step, K and V first."""

from __future__ import annotations

import pytest
import torch

from kappa.plans.cpu_offload import Division
from kappa_engine import weights as module
from kappa_engine.config import read_config
from kappa_engine.kv_cache import ArenaTooLarge
from kappa_engine.step import prompt_row
from kappa_engine.transfer import TransferFailed
from kappa_engine.weights import GROUPS, HostWeights, random_weights
from tests.engine import hf
from tests.engine.engines import (
    engine,
    even_rates,
    expected,
    finish,
    generate,
    generate_in_host,
    link_of,
    loaded_bytes,
    prompt,
    step_until,
    submit,
    weight_bytes,
)
from tests.engine.links import Link, lags
from tests.engine.rig import prompt as prompt_ids
from tests.engine.rig import rig
from tests.engine.test_host_residents import MODES, SMALL, agrees, run

ALL = HostWeights(1.0)
PLACES = [ALL, HostWeights(0.5), HostWeights(1.0, "attention"), HostWeights(0.7, "mlp")]


def named(host: HostWeights) -> str:
    return f"{host.part}-{host.share:g}"


@pytest.mark.parametrize("host", PLACES, ids=named)
@pytest.mark.parametrize("family", hf.FAMILIES)
def test_logits_are_hugging_faces_with_weights_in_host(family: str, host: HostWeights) -> None:
    with engine(family, host=host, budget_tokens=24) as made:
        handles = [submit(made, prompt(n, seed=n), 6) for n in (41, 7, 30)]
        scores, _ = run(made, *handles)
        assert all(agrees(family, handle, scores[handle]) for handle in handles)
        assert loaded_bytes(made) >= 6 * weight_bytes(made) > 0


@pytest.mark.parametrize("mode", [*MODES, "host-weights"])
def test_contexts_and_weights_in_host_are_exact_together(mode: str) -> None:
    options = {"size": SMALL, "rates": even_rates(), "host": ALL}
    options |= MODES.get(mode, {**MODES["host-kv"], "planner": mode})
    with engine("opt", **options) as made:
        handles = [submit(made, prompt(n, seed=n), 14) for n in (41, 90, 7, 66)]
        scores, _ = run(made, *handles)
        assert all(agrees("opt", handle, scores[handle]) for handle in handles)


@pytest.mark.parametrize("plan", ["kv", "cpu", "recompute"])
def test_prefixes_come_back_beside_weights_that_cross(plan: str) -> None:
    with engine(host=ALL, cpu_threads=1) as made:
        generate_in_host(made, prompt(40), count=1)
        assert generate(made, prompt(40), planner=plan) == [expected(prompt(40))]


@pytest.mark.parametrize("mode", [*MODES, "host-weights"])
def test_contexts_and_weights_are_waited_for(mode: str) -> None:
    options = {"size": SMALL, "rates": even_rates(), "host": ALL}
    options |= MODES.get(mode, {**MODES["host-kv"], "planner": mode})
    with engine("opt", **options) as made:
        link_of(made).breaks = lags
        asked = submit(made, prompt(41), 5)
        finish(made)
        assert asked.tokens[41:] == expected(asked.tokens[:41], 5, "opt")


def test_weights_cross_once_a_step_for_all_mini_batches() -> None:
    options = {"rates": even_rates(), "pass_blocks": 12, "host": ALL, **MODES["host-hybrid"]}
    with engine("opt", **options) as made:
        handles = [submit(made, prompt(n, seed=n), 12) for n in (33, 35, 22, 37)]
        for handle in handles:
            step_until(made, handle, 2)
        made.store.drain(20)
        batches, compute, copied = [], made._model.compute, []
        made._model.compute = lambda *rows, **how: (batches.append(len(rows)), compute(*rows))[1]
        link_of(made).breaks = lambda way, copies: copied.append(copies) or False
        made.step()
        made.mover.drain()
        host = {t.data_ptr() for layer in made._model.weights.layers for t in matrices(layer)}
        crossed = [s.data_ptr() for copies in copied for _, s in copies if s.data_ptr() in host]
        assert batches[0] > 1 and sorted(crossed) == sorted(host)


DIVISIONS = [
    Division(("qkv", "out"), 0.0), Division(("qkv", "out"), 0.5), Division(("qkv", "out"), 1.0),
    Division(("qkv",)), Division(()),
]  # fmt: skip


@pytest.mark.parametrize("division", DIVISIONS, ids=str)
@pytest.mark.parametrize("family", ["opt", "llama", "qwen3"])
def test_every_division_between_cpu_and_device_is_exact(family: str, division: Division) -> None:
    options = {"size": SMALL, "host": ALL, "cpu_threads": 1, "planner": "host-cpu"}
    with engine(family, budget_tokens=24, **options) as made:
        made.planning.division = lambda batch, context: division
        handles = [submit(made, prompt(n, seed=n), 14) for n in (41, 7)]
        scores, _ = run(made, *handles)
        assert all(agrees(family, handle, scores[handle]) for handle in handles)


@pytest.mark.parametrize("division", DIVISIONS, ids=str)
def test_what_the_cpu_computes_does_not_cross(division: Division) -> None:
    options = {"host": ALL, "cpu_threads": 1, "planner": "host-cpu", "budget_tokens": 40}
    with engine("opt", **options) as made:
        made.planning.division = lambda batch, context: division
        asked = submit(made, prompt(33), 8)
        step_until(made, asked, 4)
        made.store.drain(20)
        made.mover.drain()
        before = loaded_bytes(made)
        made.step()
        made.mover.drain()
        # Hidden size 64 and 96 inside, in 8 bytes, 3 layers.
        crossed = 2 * 64 * 96 - int(division.fc1_share * 96) * 64
        crossed += 3 * 64 * 64 * ("qkv" not in division.products)
        crossed += 64 * 64 * ("out" not in division.products)
        assert loaded_bytes(made) - before == 3 * 8 * crossed
        finish(made)
        assert asked.tokens[33:] == expected(asked.tokens[:33], 8, "opt")


@pytest.mark.parametrize("division", DIVISIONS, ids=str)
def test_divisions_wait_for_weights_that_cross_slowly(division: Division) -> None:
    options = {"host": ALL, "cpu_threads": 1, "planner": "host-cpu", "budget_tokens": 40}
    with engine("opt", **options) as made:
        made.planning.division = lambda batch, context: division
        link_of(made).breaks = lags
        asked = submit(made, prompt(33), 5)
        finish(made)
        assert asked.tokens[33:] == expected(asked.tokens[:33], 5, "opt")


def test_matrices_on_the_device_are_not_the_cpus() -> None:
    options = {"cpu_threads": 1, "planner": "host-cpu", "budget_tokens": 40}
    with engine("opt", host=HostWeights(1.0, "mlp"), **options) as made:
        made.planning.division = lambda batch, context: DIVISIONS[1]
        asked = submit(made, prompt(33), 5)
        finish(made)
        assert asked.tokens[33:] == expected(asked.tokens[:33], 5, "opt")
        assert set(made._model._cpu_rows) == {"up"}


def test_divisions_that_change_fetch_what_is_missing() -> None:
    options = {"host": ALL, "cpu_threads": 1, "planner": "host-cpu", "budget_tokens": 40}
    with engine("opt", **options) as made:
        turns = iter(range(100))
        made.planning.division = lambda batch, context: DIVISIONS[next(turns) % 5]
        asked = submit(made, prompt(33), 12)
        finish(made)
        assert asked.tokens[33:] == expected(asked.tokens[:33], 12, "opt")


def matrices(layer):
    return [getattr(layer, name) for names in GROUPS.values() for name in names]


def test_projections_of_keys_and_values_cross_first() -> None:
    with engine(host=ALL) as made:
        order, layers = [], made._model.weights.layers
        names = {
            getattr(layer, name).data_ptr(): (index, group)
            for index, layer in enumerate(layers)
            for group, members in GROUPS.items()
            for name in members
        }
        link_of(made).breaks = lambda way, copies: (
            order.extend(names[s.data_ptr()] for _, s in copies if s.data_ptr() in names) or False
        )
        assert generate(made, prompt(9), count=1) == [expected(prompt(9), 1)]
        groups = ["kv", "attention", "attention", "mlp", "mlp"]
        assert order[-15:-10] == [(2, group) for group in groups]


def test_a_load_that_fails_leaves_the_ring_in_order() -> None:
    with engine(host=ALL, planner="kv") as made:
        generate_in_host(made, prompt(40), count=1)
        host = made.arena.kv_host
        inside = range(host.data_ptr(), host.data_ptr() + host.nbytes)
        link_of(made).breaks = lambda way, copies: (
            way == "h2d" and any(s.data_ptr() in inside for _, s in copies)
        )
        assert generate(made, prompt(40)) == [expected(prompt(40))]
        assert made.loads.failed_loads == 1


def test_weights_that_do_not_cross_fail_the_step_not_the_next() -> None:
    with rig("llama", host=ALL, mover=Link()) as r:
        tokens, link = prompt_ids(9), r.mover
        pages = r.pages(9, ("kv", "device"))
        link.breaks = lambda way, copies: way == "h2d"
        with pytest.raises(TransferFailed):
            r.forward.compute([prompt_row(tokens, pages)])
        link.breaks = lambda way, copies: False
        got = r.forward.compute([prompt_row(tokens, pages)])
        assert r.agrees(got, r.expected(tokens)[-1:])


def test_share_spreads_evenly_over_the_layers() -> None:
    assert [i for i in range(8) if HostWeights(0.5).has(i)] == [1, 3, 5, 7]
    assert sum(HostWeights(0.3).has(i) for i in range(80)) == 24


@pytest.mark.parametrize(
    ("device", "host_free", "device_free", "says"),
    [
        (
            "cuda",
            10**9,
            300_000,
            r"of the device .*engine\.weights place host and a share of 0\.\d",
        ),
        ("cuda", 10**9, 10, r"even with engine\.weights\.share 1 it is too large"),
        ("cuda", 10, 10**9, r"of host memory .*less than 0\.5 as engine\.weights\.share"),
        ("cpu", 10, 0, r"of host memory .*less than 0\.5 as engine\.weights\.share"),
    ],
)
def test_weights_beyond_a_place_are_refused_with_a_share(
    monkeypatch, device, host_free, device_free, says
) -> None:
    config = read_config(hf.reference("llama").config.to_dict(), "llama")
    monkeypatch.setattr(module, "free_host_bytes", lambda: host_free)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (device_free, device_free))
    with pytest.raises(ArenaTooLarge, match=says):
        random_weights(config, seed=0, dtype=torch.float32, device=device, host=HostWeights(0.5))


def test_pinning_refused_is_told_with_the_remedy(monkeypatch) -> None:
    import kappa_engine.kv_cache as cache

    class Runtime:
        cudaHostRegister = staticmethod(lambda *_: 2)

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    with pytest.raises(ArenaTooLarge, match=r"cannot pin .*smaller engine\.weights\.share.*ulimit"):
        cache.pin_pages(torch.zeros(8), "give a smaller engine.weights.share")

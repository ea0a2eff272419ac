"""`kappa bench validate`: scripts share what the trace shares, and both halves see the same."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.serving.cluster_client import ClusterClient
from benchmarks.serving.mirror import (
    Overhead,
    mirror_of,
    overhead_of,
    prefill_s,
    saturation_sessions_per_s,
    simulate,
)
from benchmarks.serving.validate import Bench, Cell, compared, ranking
from benchmarks.serving.validate_play import Answered, Played, play
from benchmarks.serving.validate_traffic import (
    FORCED_TOKEN,
    SCALINGS,
    Ask,
    Scaling,
    Script,
    idle_script,
    salt_of,
    scripts,
)
from kappa.settings.cluster import ClusterSettings
from workload.catalogue import workload_named

BLOCK = 32
SETTINGS = ClusterSettings(dilation=10.0)
MIRROR = mirror_of(SETTINGS, 512.0)
OVERHEAD = Overhead(0.014, 0.012, 0.0, 10)
WORKLOADS = {name: workload_named(name) for name in SCALINGS}


def made(name, *, rate=2.0, window_s=5.0, salt=0, scaling=None):
    return scripts(
        WORKLOADS[name],
        scaling or SCALINGS[name],
        sessions_per_s=rate,
        window_s=window_s,
        dilation=10.0,
        block_tokens=BLOCK,
        max_context_tokens=8192,
        rng=np.random.default_rng(1),
        salt=salt,
    )


def alone(*lengths, output_tokens=4):
    rng = np.random.default_rng(5)
    asks = (Ask(1.0, rng.integers(100, 3000, n), output_tokens) for n in lengths)
    return [Script("s", 0.0, tuple(asks))]


# -- scripts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCALINGS)
def test_the_same_seed_makes_the_same_scripts_and_another_salt_shares_no_token_block(name):
    first, again, other = made(name), made(name), made(name, salt=salt_of("run", 2))
    assert [s.session for s in first] == [s.session for s in other]
    assert [s.start_s for s in first] == [s.start_s for s in again] == [s.start_s for s in other]
    for a, b, c in zip(first, again, other, strict=True):
        for x, y, z in zip(a.asks, b.asks, c.asks, strict=True):
            assert (x.prompt == y.prompt).all()
            assert len(x.prompt) == len(z.prompt)
            if len(x.prompt) >= BLOCK:
                assert (x.prompt[:BLOCK] != z.prompt[:BLOCK]).any()


def shared_tokens(sessions):
    """Prompt tokens in all, and those of them held already in an endless cache of blocks."""
    total, held, seen = 0, 0, set()
    for script in sessions:
        for turn in script.shape(BLOCK).turns:
            total += turn.input_tokens
            for block in turn.blocks[: (turn.input_tokens - 1) // BLOCK].tolist():
                if block not in seen:
                    break
                held += BLOCK
            seen.update(turn.kept_blocks.tolist())
    return total, held


@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_scripts_reuse_about_what_the_trace_reuses(name):
    scaling = replace(SCALINGS[name], most_output_tokens=10_000)
    total, held = shared_tokens(made(name, rate=8.0, scaling=scaling))
    size = WORKLOADS[name].block_tokens
    seen, trace_total, trace_held = set(), 0, 0
    names = {s.session.rpartition("#")[0] for s in made(name, rate=8.0)}
    for session in WORKLOADS[name].sessions:
        if session.id not in names:
            continue
        for turn in session.turns[: scaling.turns]:
            trace_total += turn.input_tokens
            for block in turn.blocks.tolist():
                if block not in seen:
                    break
                trace_held += size
            seen.update(turn.kept_blocks.tolist())
    assert held / total == pytest.approx(trace_held / trace_total, abs=0.12)


def test_every_request_fits_the_context():
    for name in SCALINGS:
        for script in made(name, rate=10.0):
            for ask in script.asks:
                assert 1 <= len(ask.prompt) <= 8192 - ask.output_tokens


def test_a_chat_carries_the_forced_answer_in_its_next_prompt():
    scaling = Scaling(tokens=1.0, turns=3, most_output_tokens=10_000)
    carried = 0
    for script in made("sharegpt", rate=8.0, scaling=scaling):
        for before, after in zip(script.asks, script.asks[1:], strict=False):
            stop = (len(before.prompt) + before.output_tokens) // BLOCK * BLOCK
            answer = after.prompt[len(before.prompt) : stop]
            if len(answer) and (after.prompt[: len(before.prompt)] == before.prompt).all():
                carried += bool((answer == FORCED_TOKEN).all())
    assert carried > 0


def test_ids_of_a_shape_are_equal_exactly_where_prompts_are():
    (script,) = alone(100, 200)
    longer = np.concatenate([script.asks[0].prompt, np.arange(100, 164)])
    other = replace(script, asks=(script.asks[0], Ask(0.0, longer, 4), script.asks[1]))
    first, second, third = other.shape(BLOCK).turns
    assert second.blocks[:3].tolist() == first.blocks.tolist()
    assert not set(third.blocks.tolist()) & set(second.blocks.tolist())
    assert len(first.kept_blocks) == 104 // BLOCK


# -- the client -------------------------------------------------------------------------------


def cluster_that_answers(seen):
    """A real HTTP server that speaks as a cluster does."""
    reports = iter(range(1, 100))

    async def nodes(request):
        n = next(reports)
        totals = {
            "time_s": 10.0 * n, "step_seconds_total": 5.0 * n, "load_seconds_total": 0.0,
            "store_seconds_total": 0.0, "steps_total": n, "overruns_total": 0,
        }  # fmt: skip
        return web.json_response({"nodes": [{"worker": "w", "node": "pcie", "totals": totals}]})

    async def decisions(request):
        actual = {"ttft_s": 0.4, "device_tokens": 32, "cached_tokens": 64, "new_tokens": 4}
        said = {
            "request_id": "id-0", "time_s": 0.0, "predicted": {"ttft_s": 0.5}, "actual": actual,
        }  # fmt: skip
        return web.json_response({"decisions": [said]})

    async def completions(request):
        body = await request.json()
        seen.append(body)
        if len(body["prompt"]) == 13:
            return web.Response(status=503)
        headers = {"x-request-id": f"id-{len(seen) - 1}", "x-kappa-node": "pcie"}
        text = 'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\ndata: [DONE]\n\n'
        return web.Response(text=text, headers=headers, content_type="text/event-stream")

    app = web.Application()
    app.router.add_get("/v1/nodes", nodes)
    app.router.add_get("/v1/decisions", decisions)
    app.router.add_post("/v1/completions", completions)
    return TestServer(app)


def played_at_a_cluster(lengths, seen):
    sessions = [
        replace(s, asks=tuple(replace(a, after_s=0.0) for a in s.asks)) for s in alone(*lengths)
    ]

    async def run():
        server = cluster_that_answers(seen)
        await server.start_server()
        async with server, ClusterClient(str(server.make_url("")), "m", timeout_s=30.0) as client:
            return await play(client, sessions)

    return asyncio.run(run())


def test_turns_go_out_in_order_with_what_the_router_said_of_them():
    seen = []
    played = played_at_a_cluster((50, 70), seen)
    assert [len(body["prompt"]) for body in seen] == [50, 70]
    assert all(body["allowed_token_ids"] == [FORCED_TOKEN] for body in seen)
    first, second = played.answers
    assert (first.turn, second.turn) == (0, 1)
    assert second.sent_s >= first.sent_s + first.total_s
    assert (first.device_tokens, first.host_tokens, first.new_tokens) == (32, 64, 4)
    assert second.new_tokens is None
    assert played.busy_share > 0
    assert msgspec.json.decode(msgspec.json.encode(played), type=Played) == played


def test_a_session_ends_at_its_first_failure_which_is_told():
    seen = []
    played = played_at_a_cluster((13, 70), seen)
    assert len(seen) == 1
    assert [a.error for a in played.answers] == ["503"]
    assert len(played.ttfts_s()) == 0


# -- the simulated half -----------------------------------------------------------------------


def answered(node, tokens, over_s):
    engine_s = prefill_s(MIRROR.by_name[node], tokens, MIRROR.budget_tokens)
    return Answered(
        "idle", 0, 0.0, tokens, 2, "r", node, engine_s + over_s, 1.0,
        decided_after_s=0.01, engine_ttft_s=engine_s + 0.008,
    )  # fmt: skip


def test_overhead_is_what_idle_requests_took_besides_their_steps():
    idle = [answered("pcie", 40, 0.03), answered("c2c", 1500, 0.034), answered("pcie", 9, 0.032)]
    found = overhead_of(idle, MIRROR.by_name, MIRROR.budget_tokens)
    assert found.total_s == pytest.approx(0.032)
    assert found.before_s == pytest.approx(0.014)
    assert found.samples == 3


def test_no_overhead_without_an_answer():
    failed = msgspec.structs.replace(answered("pcie", 40, 0.03), error="503")
    with pytest.raises(ValueError, match="idle phase"):
        overhead_of([failed], MIRROR.by_name, MIRROR.budget_tokens)


def test_a_lone_request_takes_its_steps_and_the_overhead():
    result = simulate(alone(1500), MIRROR, OVERHEAD, "ttft")
    step = MIRROR.steps[0]
    expected = prefill_s(step, 1500, MIRROR.budget_tokens) + OVERHEAD.total_s
    assert result.ttft_s.tolist() == pytest.approx([expected])
    assert expected > step.dilation * 1500 * step.token_s


def test_simulated_runs_are_seeded():
    jittery = replace(OVERHEAD, jitter_s=0.01)
    runs = [simulate(made("narrativeqa"), MIRROR, jittery, "ttft", seed) for seed in (1, 1, 2)]
    assert (runs[0].ttft_s == runs[1].ttft_s).all()
    assert (runs[0].ttft_s != runs[2].ttft_s).any()


def test_a_document_asked_about_again_is_not_computed_again():
    result = simulate(made("narrativeqa", rate=0.2), MIRROR, OVERHEAD, "ttft")
    later = result.turn > 0
    assert later.any()
    assert (result.new_tokens[later] <= BLOCK).all()


def test_saturation_is_less_than_what_arrives_then():
    asked = []

    def make(rate):
        asked.append(rate)
        return made("narrativeqa", rate=rate, window_s=10.0)

    found = saturation_sessions_per_s(make, MIRROR, OVERHEAD, 10.0)
    assert 0 < found < asked[-1]


def test_only_paced_nodes_can_be_mirrored():
    with pytest.raises(ValueError, match="'pcie' is not paced"):
        mirror_of(SETTINGS.unpaced(), 512.0)


# -- what is made of it -----------------------------------------------------------------------


def cell(policy, real, sim, load=0.8):
    return Cell(
        "t", load, policy, tuple(np.full(9, r) for r in real), tuple(np.full(9, s) for s in sim)
    )


def test_rows_tell_the_error_beside_the_spread():
    rows = compared(cell("a", (1.0, 1.1, 0.9), (1.2,)))
    assert [row["quantile"] for row in rows] == [0.5, 0.9]
    assert rows[0]["err"] == pytest.approx(0.2)
    assert rows[0]["spread"] == pytest.approx(0.2)


def test_a_ranking_counts_only_where_the_real_runs_tell():
    a, b, c = (
        cell("a", (1.0, 1.1), (1.0,)),
        cell("b", (2.0, 2.1), (3.0,)),
        cell("c", (1.05,), (9.0,)),
    )
    agree = {tuple(p["policies"]): p["agrees"] for p in ranking([a, b, c])}
    assert agree == {("a", "b"): True, ("a", "c"): None, ("b", "c"): False}
    assert ranking([a, cell("b", (2.0,), (3.0,), load=0.5)]) == []


# -- going on from records --------------------------------------------------------------------


def bench(path, **changes):
    told = {
        "settings": SETTINGS, "traces": ("narrativeqa",), "loads": (0.8,), "policies": ("ttft",),
        "runs": 2, "window_s": 5.0, "seed": 1, "records": path,
    }  # fmt: skip
    return Bench(**{**told, **changes})


def test_finished_runs_are_not_done_again(tmp_path):
    path = tmp_path / "runs.jsonl"
    before = bench(path)
    run = {"kind": "run", "policy": "ttft", "trace": "narrativeqa", "load": 0.8, "run": 0}
    run |= {"sessions_per_s": 1.5, "digest": before.digest("narrativeqa", 1.5)}
    before.keep({**run, "played": msgspec.to_builtins(Played())})
    # Of the same name, but other requests: the trace was another then.
    before.keep({**run, "run": 1, "digest": "other", "played": msgspec.to_builtins(Played())})
    before.keep({"kind": "idle", "policy": "ttft", "played": msgspec.to_builtins(Played())})
    after = bench(path)
    after.load_records()
    assert after.todo("ttft") == [("narrativeqa", 0.8, 1)]
    assert after.rates == {("narrativeqa", 0.8): 1.5}
    assert len(after.idle) == 1
    other = bench(path, window_s=9.0)
    other.load_records()
    assert len(other.todo("ttft")) == 2


def test_a_foreign_record_is_refused_by_file_and_line(tmp_path):
    path = tmp_path / "runs.jsonl"
    path.write_text('{"kind": "run"}\n')
    with pytest.raises(ValueError, match=r"runs.jsonl.*move the file away"):
        bench(path).load_records()


def test_idle_prompts_share_nothing():
    heads = [tuple(ask.prompt[:16]) for ask in idle_script(np.random.default_rng(1)).asks]
    assert len(set(heads)) == len(heads)

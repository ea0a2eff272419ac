"""`kappa bench validate`: scripts share what the trace shares, and both halves see the same."""

from dataclasses import replace
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kappa.hardware import node_profile
from kappa.model import ModelShape
from kappa.settings.cluster import ClusterSettings
from kappa.silicon import silicon_table
from kappa_benchmarks.serving.client import ClusterClient
from kappa_benchmarks.serving.mirror import (
    Overhead,
    mirror_of,
    overhead_of,
    saturation_sessions_per_s,
    simulate,
)
from kappa_benchmarks.serving.validate import Bench, Cell, Kept, compared, ranking
from kappa_benchmarks.serving.validate_play import Answered, Played, play
from kappa_benchmarks.serving.validate_scripts import (
    FORCED_TOKEN,
    SCALINGS,
    Request,
    Scaling,
    Script,
    ScriptMaker,
    digest,
    idle_script,
    salt_of,
)
from kappa_workload.catalogue import workload_named

BLOCK = 32
SETTINGS = ClusterSettings(dilation=10.0)
# 2 layers, keys and values of 32 numbers of 4 bytes: 512 bytes a token; 1,000 parameters.
SERVED = ModelShape(
    "tiny", layers=2, hidden=64, heads=2, kv_heads=1, head_dim=32, params_active=1e3,
    params_total=1e3, attention="gqa", kv_dtype_bytes=4.0, weight_dtype_bytes=4.0,
)  # fmt: skip
MIRROR = mirror_of(SETTINGS, SERVED)
OVERHEAD = Overhead(0.014, 0.012, 0.0, 10)
WORKLOADS = {name: workload_named(name) for name in SCALINGS}


def made(name, *, rate=2.0, window_s=5.0, salt=0, scaling=None):
    maker = ScriptMaker(
        WORKLOADS[name], scaling or SCALINGS[name], window_s, 10.0, BLOCK, 8192, seed=1
    )
    return maker.scripts(rate, salt)


def alone(*lengths, after_s=1.0):
    rng = np.random.default_rng(5)
    requests = (Request(after_s, rng.integers(100, 3000, n), 4) for n in lengths)
    return [Script("s", 0.0, tuple(requests))]


# -- scripts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCALINGS)
def test_scripts_repeat_for_a_seed_and_share_no_block_else(name):
    first, again, other = made(name), made(name), made(name, salt=salt_of("run", 2))
    assert digest(first) == digest(again) == digest(other)
    for a, b, c in zip(first, again, other, strict=True):
        for x, y, z in zip(a.requests, b.requests, c.requests, strict=True):
            assert (x.prompt == y.prompt).all()
            if len(x.prompt) >= BLOCK:
                assert (x.prompt[:BLOCK] != z.prompt[:BLOCK]).any()


def reused_share(sessions, size):
    """Share of the prompts' tokens held already by an endless cache of blocks."""
    total, held, seen = 0, 0, set()
    for turn in (turn for session in sessions for turn in session.turns):
        total += turn.input_tokens
        for block in turn.blocks.tolist():
            if block not in seen:
                break
            held += size
        seen.update(turn.kept_blocks.tolist())
    return held / total


@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_scripts_reuse_about_what_the_trace_reuses(name):
    scaling = replace(SCALINGS[name], most_output_tokens=10_000)
    scripts = made(name, rate=8.0, scaling=scaling)
    names = {script.session.rpartition("#")[0] for script in scripts}
    trace = [
        replace(session, turns=session.turns[: scaling.turns])
        for session in WORKLOADS[name].sessions
        if session.id in names
    ]
    ours = reused_share([script.shape(BLOCK) for script in scripts], BLOCK)
    assert ours == pytest.approx(reused_share(trace, WORKLOADS[name].block_tokens), abs=0.12)


def test_every_request_fits_the_context():
    for name in SCALINGS:
        for script in made(name, rate=10.0):
            for one in script.requests:
                assert 1 <= len(one.prompt) <= 8192 - one.output_tokens


def test_a_chat_carries_the_forced_answer_in_its_next_prompt():
    scaling = Scaling(tokens=1.0, turns=3, most_output_tokens=10_000)
    carried = 0
    for script in made("sharegpt", rate=8.0, scaling=scaling):
        for before, after in pairwise(script.requests):
            stop = (len(before.prompt) + before.output_tokens) // BLOCK * BLOCK
            answer = after.prompt[len(before.prompt) : stop]
            if len(answer) and (after.prompt[: len(before.prompt)] == before.prompt).all():
                carried += bool((answer == FORCED_TOKEN).all())
    assert carried > 0


def test_ids_of_a_shape_are_equal_exactly_where_prompts_are():
    (script,) = alone(100, 200)
    first, last = script.requests
    longer = Request(0.0, np.concatenate([first.prompt, np.arange(100, 164)]), 4)
    one, two, three = replace(script, requests=(first, longer, last)).shape(BLOCK).turns
    assert two.blocks[:3].tolist() == one.blocks.tolist()
    assert not set(three.blocks.tolist()) & set(two.blocks.tolist())
    assert len(one.kept_blocks) == 104 // BLOCK


def test_idle_prompts_share_nothing():
    heads = [tuple(one.prompt[:16]) for one in idle_script(np.random.default_rng(1)).requests]
    assert len(set(heads)) == len(heads)


# -- the client -------------------------------------------------------------------------------


def cluster_that_answers(seen):
    """A real HTTP server that speaks as a cluster does; a prompt of 13 tokens fails."""
    reports = iter(range(1, 100))

    async def nodes(request):
        n = next(reports)
        totals = {
            "time_s": 10.0 * n, "step_seconds_total": 5.0 * n, "load_seconds_total": 0.0,
            "store_seconds_total": 0.0, "steps_total": n, "overruns_total": 0,
            "stores_dropped_total": 0,
        }  # fmt: skip
        return web.json_response({"nodes": [{"worker": "w", "node": "pcie", "totals": totals}]})

    async def decisions(request):
        decision = {"request_id": "id-0", "time_s": 0.0, "actual": {"ttft_s": 0.4}}
        return web.json_response({"decisions": [decision]})

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


async def played_at_a_cluster(lengths):
    seen = []
    async with (
        cluster_that_answers(seen) as server,
        ClusterClient(str(server.make_url("")), "m", timeout_s=30.0) as client,
    ):
        return await play(client, alone(*lengths, after_s=0.0)), seen


async def test_turns_go_out_in_order_with_the_routers_report():
    played, seen = await played_at_a_cluster((50, 70))
    assert [len(body["prompt"]) for body in seen] == [50, 70]
    assert all(body["allowed_token_ids"] == [FORCED_TOKEN] for body in seen)
    first, second = played.answers
    assert second.sent_s >= first.sent_s + first.ttft_s
    assert (first.node, first.prompt_tokens, first.engine_ttft_s) == ("pcie", 50, 0.4)
    assert second.engine_ttft_s is None
    assert played.busy_share > 0
    assert msgspec.json.decode(msgspec.json.encode(played), type=Played) == played


async def test_a_session_ends_at_its_first_failure_which_is_noted():
    played, seen = await played_at_a_cluster((13, 70))
    assert len(seen) == 1
    assert [answer.error for answer in played.answers] == ["503"]
    assert len(played.ttfts_s()) == 0


# -- the simulated half -----------------------------------------------------------------------


def answered(node, tokens, over_s, error=""):
    engine_s = MIRROR.prefill_s(node, tokens)
    return Answered(0.0, tokens, "r", node, engine_s + over_s, error, 0.01, engine_s + 0.008)


def test_overhead_is_what_idle_requests_took_besides_their_steps():
    idle = [answered("pcie", 40, 0.03), answered("c2c", 1500, 0.034), answered("pcie", 9, 0.032)]
    found = overhead_of([*idle, answered("pcie", 40, 9.0, error="503")], MIRROR)
    assert (found.total_s, found.before_s) == pytest.approx((0.032, 0.014))
    assert found.jitter_s == pytest.approx(1.4826 * 0.002)
    assert found.samples == 3
    with pytest.raises(ValueError, match=r"idle phase.*503"):
        overhead_of([answered("pcie", 40, 0.03, error="503")], MIRROR)


def test_a_lone_request_takes_its_steps_and_the_overhead():
    expected = MIRROR.prefill_s("pcie", 1500) + OVERHEAD.total_s
    assert simulate(alone(1500), MIRROR, OVERHEAD, "ttft").ttft_s == pytest.approx([expected])
    step = MIRROR.announcements[0].step
    assert expected > step.dilation * 1500 * step.token_s


def test_simulated_runs_are_seeded():
    jittery = replace(OVERHEAD, jitter_s=0.01)
    runs = [simulate(made("narrativeqa"), MIRROR, jittery, "ttft", seed) for seed in (1, 1, 2)]
    assert (runs[0].ttft_s == runs[1].ttft_s).all()
    assert (runs[0].ttft_s != runs[2].ttft_s).any()


def test_a_prompt_that_comes_again_is_not_computed_again():
    (script,) = alone(2000)
    again = replace(script, requests=script.requests * 2)
    first_s, second_s = simulate([again], MIRROR, OVERHEAD, "ttft").ttft_s
    assert second_s - OVERHEAD.total_s < 0.2 * (first_s - OVERHEAD.total_s)


def test_saturation_is_less_than_what_arrives_then():
    rates = []

    def make(rate):
        rates.append(rate)
        return made("narrativeqa", rate=rate, window_s=10.0)

    assert 0 < saturation_sessions_per_s(make, MIRROR, 10.0) < rates[-1]


def test_unpaced_nodes_are_mirrored_as_measured():
    real = ClusterSettings(
        pools=(
            {"name": "whole", "profile": "pcie", "engine": {"host_bytes": 1 << 20}},
            {"name": "half", "profile": "pcie", "engine": {"max_batch_tokens": 128}},
        ),
        engine={"host_bytes": 1 << 21},
    )
    with pytest.raises(ValueError, match="'whole' is not paced, and was not measured"):
        mirror_of(real, SERVED)
    measured = {
        name: replace(node_profile("pcie"), name=name, flops_per_s=flops, h2d_bytes_per_s=5.12e6)
        for name, flops in (("whole", 1e9), ("half", 5e8))
    }
    mirror = mirror_of(real, SERVED, measured)
    whole, half = mirror.models
    # 2 FLOPs a parameter; 32 tokens of 512 bytes over 5.12 MB/s.
    assert whole.step.token_s == pytest.approx(2e-6) and half.step.token_s == pytest.approx(4e-6)
    assert whole.load_block_s == pytest.approx(32 * 512 / 5.12e6)
    assert (whole.host_blocks, half.host_blocks) == (64, 128)
    assert (whole.budget_tokens, half.budget_tokens) == (1024, 128)
    assert [each.worker for each in mirror.announcements] == ["whole", "half"]


def test_node_of_silicon_is_mirrored_by_its_table():
    table = "h100_sxm/llama-3.1-8b/tp1"
    nodes = ({"name": "a", "profile": "pcie", "silicon": table},)
    mirror = mirror_of(ClusterSettings(nodes=nodes, dilation=30.0), SERVED)
    by_table_s = sum(silicon_table(table).step_s([chunk]) for chunk in ((1024, 0), (76, 1024)))
    assert mirror.prefill_s("a", 1100) == pytest.approx(30.0 * by_table_s)


# -- rows and rankings ------------------------------------------------------------------------


def cell(policy, real, sim, load=0.8):
    return Cell("t", load, policy, [np.full(9, r) for r in real], [np.full(9, s) for s in sim])


def test_rows_give_the_error_beside_the_spread():
    rows = compared(cell("a", (1.0, 1.1, 0.9), (1.2,)))
    assert [row["quantile"] for row in rows] == [0.5, 0.9]
    assert (rows[0]["err"], rows[0]["spread"]) == pytest.approx((0.2, 0.2))


def test_a_ranking_counts_only_where_the_real_runs_decide():
    a, b, c = (
        cell("a", (1.0, 1.1), (1.0,)),
        cell("b", (2.0, 2.1), (3.0,)),
        cell("c", (1.05,), (9.0,)),
    )
    agree = {tuple(pair["policies"]): pair["agrees"] for pair in ranking([a, b, c])}
    assert agree == {("a", "b"): True, ("a", "c"): None, ("b", "c"): False}
    assert ranking([a, cell("b", (2.0,), (3.0,), load=0.5)]) == []


# -- going on from records --------------------------------------------------------------------


def bench(path, window_s=5.0):
    return Bench(SETTINGS, ("narrativeqa",), (0.8,), ("ttft",), 2, window_s, 1, path)


def test_finished_runs_are_not_done_again(tmp_path):
    path = tmp_path / "runs.jsonl"
    before = bench(path)
    requests = digest(before.maker("narrativeqa").scripts(1.5))
    run = Kept(before.key, "ttft", Played(), "narrativeqa", 0.8, 0, 1.5, requests)
    before.keep(run)
    # Of the same name, but other requests: the trace was another then.
    before.keep(msgspec.structs.replace(run, run=1, digest="other"))
    before.keep(Kept(before.key, "ttft", Played()))
    after = bench(path)
    after.load_records()
    assert after.missing("ttft") == [("narrativeqa", 0.8, 1)]
    assert after.rates == {("narrativeqa", 0.8): 1.5}
    assert len(after.idle) == 1
    other = bench(path, window_s=9.0)
    other.load_records()
    assert len(other.missing("ttft")) == 2


def test_a_foreign_record_is_refused_with_the_remedy(tmp_path):
    path = tmp_path / "runs.jsonl"
    path.write_text('{"kind": "run"}\n')
    with pytest.raises(ValueError, match=r"runs.jsonl.*move the file away"):
        bench(path).load_records()

import math
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from kappa.cost import step_model
from kappa.hardware import node_profile
from kappa.model import kv_bytes_per_token
from kappa.shapes import model_shape
from kappa_simulator.capacity import NodeClass, bound_of, capacity_rps, node_classes, request_costs
from kappa_simulator.reuse import Turns, turns_of
from kappa_workload.replay import expand
from kappa_workload.shapes import SessionShape, TurnShape, Workload

BLOCK = 16
SHAPE = model_shape("llama-3.1-8b")


def plain(name):
    """A node of the catalogue that takes nothing for a load but its bytes at the link's rate."""
    return replace(node_profile(name), load_fixed_s=0.0, copy_fixed_s=0.0)


FAST = NodeClass(plain("gh200-c2c"), host_bytes=512e9, count=1)
SLOW = NodeClass(plain("a100-pcie4"), host_bytes=512e9, count=1)
FEW = 200  # requests to count


def turn(rng, prefix, tokens, output=1, after_s=0.0):
    """A turn with a prompt that starts with the blocks `prefix`."""

    def fresh(n):
        return rng.integers(1, 2**63, n, dtype=np.uint64)

    blocks = np.concatenate([prefix, fresh(tokens // BLOCK)])[: tokens // BLOCK]
    kept = np.concatenate([blocks, fresh((tokens + output) // BLOCK - len(blocks))])
    return TurnShape(after_s, tokens, output, blocks, kept)


def workload(*sessions):
    named = tuple(SessionShape(str(i), tuple(turns)) for i, turns in enumerate(sessions))
    return Workload("made up", BLOCK, named, "none")


NOTHING = np.zeros(0, np.uint64)


def fresh_prompts(tokens=16_000, output=1, count=20):
    rng = np.random.default_rng(1)
    return workload(*[[turn(rng, NOTHING, tokens, output)] for _ in range(count)])


def documents(questions=10, tokens=64_000, count=20):
    rng = np.random.default_rng(2)
    sessions = []
    for _ in range(count):
        document = rng.integers(1, 2**63, tokens // BLOCK, dtype=np.uint64)
        sessions += [[turn(rng, document, tokens + 48)] for _ in range(questions)]
    return workload(*sessions)


def turns(cached, new, output=1.0, held_s=0.0):
    shape = np.broadcast_shapes(np.shape(cached), np.shape(new), np.shape(held_s), (1,))
    cached, new, output, held_s = (
        np.broadcast_to(np.asarray(x, float), shape) for x in (cached, new, output, held_s)
    )
    return Turns(cached, new, output, cached * held_s)


def test_fresh_prompts_are_bound_by_compute_alone():
    step = step_model(SHAPE, FAST.profile)
    prefill_s = 16_000 * step.token_s + 0.5 * 16_000**2 * step.pair_s
    bound = capacity_rps(fresh_prompts(), [FAST], SHAPE, requests=FEW)
    assert bound == pytest.approx(1 / prefill_s)


def test_cached_prompts_are_bound_by_the_link():
    loads = turns(cached=20_000, new=1, held_s=0.0)
    # With no time to hold anything the device would serve all; a long wait leaves the link.
    held = replace(loads, held_token_s=loads.cached_tokens * 1e6)
    roomy = replace(SLOW, host_bytes=1e18)
    load_s = 20_000 * kv_bytes_per_token(SHAPE) / SLOW.profile.h2d_bytes_per_s
    bound = bound_of(held, [roomy], SHAPE)
    by_link = bound.flow_rps[0, 0, 0] * load_s
    assert by_link == pytest.approx(1.0)
    assert bound.rps > bound_of(turns(cached=0, new=20_001), [roomy], SHAPE).rps


def test_a_device_hit_needs_no_link_but_room():
    quick = bound_of(turns(cached=20_000, new=1, held_s=0.0), [SLOW], SHAPE)
    slow = bound_of(turns(cached=20_000, new=1, held_s=1e6), [SLOW], SHAPE)
    assert quick.flow_rps[:, :, 2].sum() == pytest.approx(quick.lp_rps)
    assert quick.rps > 2 * slow.rps


def test_memory_that_cannot_hold_prefixes_leaves_recomputing():
    tight = replace(SLOW, host_bytes=0.0)
    never = bound_of(turns(cached=20_000, new=1, held_s=1e9), [tight], SHAPE)
    anew = bound_of(turns(cached=0, new=20_001), [tight], SHAPE)
    assert never.rps == pytest.approx(anew.rps, rel=1e-3)


def test_twice_the_nodes_serve_twice_the_requests():
    # The prefixes' holding time shrinks as the rate grows, so perhaps a little more than twice.
    once, twice = (
        capacity_rps(documents(), 4 * [FAST, SLOW] * count, SHAPE, requests=FEW) for count in (1, 2)
    )
    assert twice == pytest.approx(2 * once, rel=0.05)


def test_like_nodes_are_counted_together_whatever_their_names():
    named = [
        replace(node, profile=replace(node.profile, name=f"{i}"))
        for i, node in enumerate((FAST, SLOW, FAST))
    ]
    found = [(c.profile.name, c.count) for c in node_classes(named)]
    assert found == [("0", 2), ("1", 1)]


def test_unlike_nodes_are_worth_more_than_each_alone():
    """Comparative advantage: they divide the work, loads to the fast link, computing to both."""
    rng = np.random.default_rng(3)
    cached = np.where(rng.random(500) < 0.8, 60_000.0, 0.0)
    mix = turns(cached=cached, new=np.where(cached > 0, 16.0, 9_000.0), held_s=1e5)
    roomy = [replace(node, host_bytes=1e18) for node in (FAST, SLOW)]
    parts = sum(bound_of(mix, [node], SHAPE).rps for node in roomy)
    assert bound_of(mix, roomy, SHAPE).rps > 1.1 * parts


def test_the_bound_is_above_the_clustered_plan_and_close_to_it(monkeypatch):
    rng = np.random.default_rng(4)
    mix = turns(
        cached=rng.pareto(1.5, 3_000) * 4_000,
        new=rng.pareto(1.5, 3_000) * 300 + 1,
        output=rng.integers(1, 400, 3_000),
        held_s=rng.exponential(600, 3_000),
    )
    fine = bound_of(mix, [FAST, SLOW], SHAPE)
    monkeypatch.setattr("kappa_simulator.capacity._REFINEMENTS", 0)
    coarse = bound_of(mix, [FAST, SLOW], SHAPE)
    assert coarse.lp_rps <= coarse.rps * (1 + 1e-9)
    assert fine.lp_rps <= coarse.rps * (1 + 1e-9)
    assert coarse.lp_rps <= fine.rps * (1 + 1e-9)
    assert fine.rps - fine.lp_rps < 0.07 * fine.rps
    assert fine.rps <= coarse.rps


def test_the_bound_holds_for_every_assignment_that_can_be_tried():
    """Two nodes and five requests: no split of their repetition uses less of the worst resource."""
    rng = np.random.default_rng(5)
    mix = turns(cached=rng.uniform(0, 50_000, 5), new=rng.uniform(1, 5_000, 5), held_s=1e7)
    roomy = [replace(node, host_bytes=1e18) for node in (FAST, SLOW)]
    bound = bound_of(mix, roomy, SHAPE).rps
    costs = np.stack([request_costs(mix, node, SHAPE) for node in roomy], axis=1)[..., :3]
    best = math.inf
    for code in range(4**5):
        use = np.zeros((2, 3))
        for request in range(5):
            node, option = divmod(code // 4**request % 4, 2)
            use[node] += costs[request, node, option]
        best = min(best, use.max())
    assert 5 / best <= bound * (1 + 1e-9)


def test_decoding_takes_compute_and_reads():
    silent, chatty = (
        capacity_rps(fresh_prompts(tokens=512, output=n), [FAST], SHAPE, requests=FEW)
        for n in (1, 512)
    )
    assert chatty < 0.55 * silent


def test_few_sequences_per_step_make_decoding_cost_more(monkeypatch):
    work = fresh_prompts(tokens=512, output=512)
    free = capacity_rps(work, [FAST], SHAPE, requests=FEW)
    monkeypatch.setattr("kappa_simulator.capacity.MAX_SEQS", 8.0)
    bound = capacity_rps(work, [FAST], SHAPE, requests=FEW)
    step_s = step_model(SHAPE, FAST.profile).weights_s
    assert bound < free and bound <= 8 / (511 * step_s)


def test_turns_find_reuse_across_sessions_but_not_across_copies():
    rng = np.random.default_rng(6)
    first = turn(rng, NOTHING, 160, output=16)
    second = turn(rng, first.kept_blocks, 320, after_s=30.0)
    found = turns_of(workload([first, second], [first]).sessions, BLOCK, rate_rps=1.0)
    assert found.cached_tokens.tolist() == [0, 176, 159]  # the last token is always computed
    assert found.new_tokens.tolist() == [160, 144, 1]
    # The two sessions start 1.5 s apart, and the second uses what the first one left.
    assert found.held_token_s[2] == pytest.approx(1.5 * 159)
    assert found.held_token_s[1] == pytest.approx(28.5 * 176, rel=1e-6)

    copies = list(islice(expand(documents(questions=1, count=20), 0), 40))
    assert turns_of(copies, BLOCK, math.inf).cached_tokens.max() == 0


def test_warm_turns_hold_documents_but_no_histories():
    rng = np.random.default_rng(7)
    document = rng.integers(1, 2**63, 100, dtype=np.uint64)
    reading = [turn(rng, document, 1_750), turn(rng, document, 1_700)]
    chat = [turn(rng, NOTHING, 160, output=16)]
    chat.append(turn(rng, chat[0].kept_blocks, 320))
    sessions = workload(reading, chat).sessions
    cold, warm = (turns_of(sessions, BLOCK, 1.0, warm=w).cached_tokens for w in (False, True))
    assert cold.tolist() == [0, 1_600, 0, 176]
    assert warm.tolist() == [1_600, 1_600, 0, 176]


def test_a_longer_horizon_finds_the_reuse_of_its_copies_only():
    work = documents(questions=10, count=4)
    one, many = (capacity_rps(work, [FAST], SHAPE, requests=n) for n in (40, 400))
    assert many == pytest.approx(one, rel=0.05)


def test_turns_sample_long_prompts_and_round_cached_tokens_up(monkeypatch):
    sessions = documents(questions=4, tokens=16_000, count=4).sessions
    exact = turns_of(sessions, BLOCK, 1.0)
    monkeypatch.setattr("kappa_simulator.reuse._MAX_VISITS", 2_000)
    rough = turns_of(sessions, BLOCK, 1.0)
    assert np.all(rough.cached_tokens >= exact.cached_tokens)
    assert np.all(rough.cached_tokens - exact.cached_tokens <= 20 * BLOCK)


def test_same_input_gives_the_same_bits():
    first, second = (capacity_rps(documents(), [FAST, SLOW], SHAPE, requests=FEW) for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("nodes", "work", "message"),
    [
        ([], fresh_prompts(), "no nodes"),
        ([FAST], workload(), "no sessions"),
        (
            [replace(FAST, profile=replace(FAST.profile, hbm_bytes=10e9))],
            fresh_prompts(),
            "gh200-c2c.*smaller",
        ),
    ],
)
def test_what_cannot_be_bounded_is_refused(nodes, work, message):
    with pytest.raises(ValueError, match=message):
        capacity_rps(work, nodes, SHAPE)

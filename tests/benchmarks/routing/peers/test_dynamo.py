"""`kappa bench dynamo`: Dynamo's events and names, the mockers' tables, loads and rows."""

import struct

import msgspec
import numpy as np
import pytest
import xxhash

from kappa.silicon import silicon_table
from kappa_benchmarks.routing.peers.dynamo import (
    HarnessLoad,
    announcement,
    frontend_options,
)
from kappa_benchmarks.routing.peers.dynamo_cluster import (
    CLUSTERS,
    Emulation,
    step_of,
    step_tables,
    tables_of,
)
from kappa_benchmarks.routing.peers.dynamo_proxy import apply, block_hashes, tier_events
from kappa_benchmarks.routing.peers.dynamo_rows import TUNING_SEED, Sent, figures, summary, tuned
from kappa_benchmarks.routing.peers.routers import PeerError
from kappa_router.index.prefix_hash import PrefixHasher
from kappa_router.index.prefix_index import PrefixIndex

NODES = {7: "0-slow", 9: "1-fast"}


def frame(*events, as_bytes=True):
    payload = [
        {"worker_id": 7, "storage_tier": tier, "residency_domain": None,
         "event": {"event_id": 1, "dp_rank": 0, "data": data}}
        for tier, data in events
    ]  # fmt: skip
    inner = msgspec.msgpack.encode(payload) if as_bytes else payload
    return b"\x01\0\0\0\0" + msgspec.msgpack.encode({"topic": "kv-events", "payload": inner})


def stored(names):
    blocks = [{"block_hash": int(name), "tokens_hash": 1} for name in names]
    return {"stored": {"parent_hash": None, "start_position": 0, "blocks": blocks}}


def test_names_of_blocks_are_chained_hashes_of_their_tokens():
    tokens = list(range(40))
    own = [
        xxhash.xxh3_64_intdigest(struct.pack("<16I", *tokens[i : i + 16]), seed=1337)
        for i in (0, 16)
    ]
    chained = xxhash.xxh3_64_intdigest(struct.pack("<QQ", own[0], own[1]), seed=1337)
    assert block_hashes(tokens, 16).tolist() == [own[0], chained]


@pytest.mark.parametrize("as_bytes", [True, False])
def test_the_index_follows_both_tiers_of_the_native_event_plane(as_bytes):
    names = block_hashes(list(range(64)), 16)
    index = PrefixIndex(PrefixHasher(16, 1), 100)
    gone = {"removed": {"block_hashes": [int(names[3])]}}
    message = frame(
        ("device", stored(names)), ("host_pinned", stored(names)), ("device", gone),
        ("g4", stored(names)), ("device", "cleared"), as_bytes=as_bytes,
    )  # fmt: skip
    assert apply(index, tier_events(message)) == 9
    device, host, _ = index.match_columns(names)[:, index.column("7")]
    assert (device, host) == (3, 1)


def test_a_malformed_event_says_what_it_is():
    with pytest.raises(ValueError, match="malformed KV event of Dynamo's"):
        tier_events(b"\x01\0\0\0\0" + msgspec.msgpack.encode({"payload": {"a": 1}}))


def test_a_mockers_table_is_the_catalogues_step_at_the_dilation():
    step = step_of("h100-pcie5", 2.0)
    made = step_tables(step)
    new, taken_ms = made["prefill_isl"][-1], made["prefill_ttft_ms"][-1]
    assert new == 8192
    # GEMMs, the part of the weights that they do not hide, attention; and twice the fixed 2 ms.
    gemm_s, pairs = 8192 * step.token_s + step.exposed * step.weights_s, 0.5 * 8192**2
    assert taken_ms == pytest.approx(1e3 * (gemm_s + pairs * step.pair_s + 0.004))
    # One token reads the weights, and the GEMMs hide behind them but for a part.
    least_s = step.weights_s + step.exposed * step.token_s + 0.004
    assert made["prefill_ttft_ms"][0] == pytest.approx(1e3 * least_s, rel=1e-3)
    assert made["decode_itl"].shape == (64, 64)
    assert all(array.dtype == np.float64 for array in made.values())


def test_a_mockers_table_of_silicon_is_the_tables_own(tmp_path):
    name, made = "h100_sxm/llama-3.1-8b/tp1", tmp_path / "node.npz"
    np.savez(made, **tables_of(name, 2.0))
    with np.load(made) as data:
        arrays = {key: data[key] for key in data.files}
    assert set(arrays) == set(tables_of("h100-pcie5", 1.0))
    assert all(array.dtype == np.float64 for array in arrays.values())
    table, host_ms = silicon_table(name), 2.0
    # Twice as long, with the host's 2 ms a step.
    isl, ttft_ms = arrays["prefill_isl"], arrays["prefill_ttft_ms"]
    assert isl.tolist() == table.new.tolist()
    assert ttft_ms == pytest.approx(2 * (1e3 * table.prefill[:, 0] + host_ms))
    held, context = arrays["decode_active_kv_tokens"], arrays["decode_context_length"]
    itl_ms = arrays["decode_itl"]
    assert itl_ms.shape == (len(held), len(context)) and np.isfinite(itl_ms).all()
    for row, requests in enumerate(table.batch):
        for column, each in enumerate(context):
            if (at := np.flatnonzero(held == requests * each)).size and requests * each <= 1 << 18:
                of_table_ms = 1e3 * table.decode[row, column]
                assert itl_ms[at[0], column] == pytest.approx(2 * (of_table_ms + host_ms), rel=1e-6)
    assert (np.diff(held) > 0).all() and held[-1] == 262_144 and context[-1] == 65_536


@pytest.mark.parametrize(("name", "says"), [
    ("h100_sxm/llama-3.1-8b/tp2", "no table of silicon named"),
    ("h100_sxm/qwen3-32b/tp2", "another model than llama-3.1-8b: choose one of its own"),
])  # fmt: skip
def test_a_mocker_of_a_table_that_is_not_there_is_refused(name, says):
    with pytest.raises(ValueError, match=says):
        tables_of(name, 1.0)


def test_mockers_of_silicon_are_announced_by_its_gpus_law():
    slow, *_ = CLUSTERS["unlike-silicon"]
    emulation = Emulation(CLUSTERS["unlike-silicon"], dilation=2.0)
    made, law = announcement(slow, 7, emulation, 1.0), silicon_table(slow.profile).law
    assert (slow.name, made.node.gpu) == ("0-a100_sxm-5", "A100-SXM4-80GB")
    assert made.node.silicon == slow.profile and made.node.h2d_bytes_per_s == 2.5e9
    assert made.step.token_s == pytest.approx(2 * law.token_s)
    assert made.step.fixed_s == pytest.approx(0.004)


def test_a_wrong_prior_is_off_by_its_factor_in_every_constant():
    emulation = Emulation(CLUSTERS["pair"], dilation=2.0)
    true, wrong = (announcement(CLUSTERS["pair"][0], 7, emulation, by) for by in (1.0, 3.0))
    assert true.worker == "7"
    assert true.node.h2d_bytes_per_s == 2.5e9
    ratios = [
        getattr(wrong.step, name) / getattr(true.step, name)
        for name in ("token_s", "pair_s", "weights_s", "context_token_s", "fixed_s")
    ]
    assert ratios == pytest.approx([1 / 3, 3, 1 / 3, 3, 1 / 3])
    assert wrong.node.h2d_bytes_per_s * 3 == pytest.approx(true.node.h2d_bytes_per_s)


def test_arms_are_options_of_dynamos_frontend(tmp_path):
    assert frontend_options("ours-wrong", tmp_path) == ["--router-mode", "direct"]
    assert frontend_options("least-loaded", tmp_path) == ["--router-mode", "least-loaded"]
    assert frontend_options("kv:host-cache-hit-weight=1", tmp_path) == [
        "--router-mode", "kv", "--router-host-cache-hit-weight", "1"
    ]  # fmt: skip
    options = frontend_options("two-tier", tmp_path)
    assert options[:2] == ["--router-mode", "kv"]
    assert "dynamo-two-tier-cost-fn" in (tmp_path / "policy.yaml").read_text()
    with pytest.raises(ValueError, match="is not NAME=VALUE"):
        frontend_options("kv:scale", tmp_path)


def test_load_repeats_for_a_seed_and_shares_no_tokens_else():
    load = HarnessLoad("miniswe", requests=30, rate=5.0)
    first, again, other = load.sessions(1), load.sessions(1), load.sessions(2)
    assert sum(len(s.requests) for s in first) >= 30
    assert [s.arrival_s for s in first] == [s.arrival_s for s in again]
    prompts = [s[0].requests[0].make_prompt() for s in (first, again, other)]
    assert (prompts[0] == prompts[1]).all()
    assert not (prompts[0][:64] == prompts[2][:64]).all()


def sent(number, ttft_s, instance=7, error=""):
    first_s = None if error else number + ttft_s
    return Sent(
        f"r{number}", 100, float(number), float(number), first_s, number + 1.0, instance, 50, error
    )


def test_a_row_leaves_out_the_first_fifth_and_what_failed():
    found = [sent(n, 9.0) for n in range(2)] + [sent(n, 0.1 * n, 9) for n in range(2, 9)]
    found.append(sent(9, 0.0, error="no token came"))
    decisions = {"r3": {
        "predicted_s": 0.6, "ttft_s": 0.5, "kind": "compute", "held": 40, "host": 0, "new": 60,
        "queue_s": 0.0, "load_s": 0.0, "compute_s": 0.5, "in_flight": 1, "route_ms": 0.2,
    }}  # fmt: skip
    row = figures(found, NODES, decisions)
    assert (row["requests"], row["measured"], row["failed"]) == (10, 8, {"no token came": 1})
    assert row["ttft_s"]["mean"] == pytest.approx(0.5)
    assert row["share"] == {"0-slow": 0.0, "1-fast": 1.0}
    assert row["cached"] == 0.5
    assert row["prediction"]["first_200"]["median"] == pytest.approx(0.2)


def test_the_summary_pairs_ours_with_each_arm_by_seed():
    def run(arm, seed, ttft_s):
        return {
            "trace": "t", "arm": arm, "seed": seed, "requests": 10, "failed": {"x": 1},
            "cached": 0.5, "share": {"a": 1.0},
            "ttft_s": {"p50": ttft_s, "p99": ttft_s, "mean": ttft_s},
        }  # fmt: skip

    rows = [run("ours", 1, 1.0), run("ours", 2, 2.0), run("kv", 1, 2.0), run("kv", 2, 4.0)]
    ours, kv = summary(rows)
    assert "ours_over_it" not in ours
    assert kv["ours_over_it"]["mean"]["mean"] == pytest.approx(0.5)
    assert (kv["requests"], kv["failed"], kv["seeds"]) == (20, 2, [1, 2])


def test_tuned_arm_is_the_least_mean_of_runs_without_failures():
    def row(arm, mean, seed=TUNING_SEED, failed=None, cluster="unlike"):
        return {
            "trace": "miniswe", "cluster": cluster, "arm": arm, "seed": seed,
            "failed": failed or {}, "ttft_s": {"mean": mean},
        }  # fmt: skip

    half, whole = "kv:host-cache-hit-weight=0.5", "kv:host-cache-hit-weight=1"
    rows = [
        row("kv", 0.3), row(half, 0.2), row(whole, 0.1, failed={"status 503": 1}),
        row(whole, 0.1, seed=1), row(whole, 0.1, cluster="equal"), row("ours", 0.1),
    ]  # fmt: skip
    assert tuned(rows, "miniswe", "unlike") == half
    with pytest.raises(PeerError, match="kv-tuned: no run of seed 1000"):
        tuned(rows, "mooncake", "unlike")

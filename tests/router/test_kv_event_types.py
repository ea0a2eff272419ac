"""The KV event stream: sequence bookkeeping, and vLLM's payloads decoded."""

from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kappa_router.index.kv_event_types import (
    BlocksRemoved,
    BlocksStored,
    CacheGroups,
    StreamCursor,
    TierCleared,
    decode,
    joined,
)
from kappa_router.index.lookup import Match
from kappa_router.index.prefix_hash import PrefixHasher, salt_of, secret_from_seed
from kappa_router.index.prefix_index import PrefixIndex
from tests.router.building import match_worker
from tests.router.kv_batches import batch, decode_batch, removed, stored


def one(event):
    (decoded,) = decode_batch(batch(event), "w")
    return decoded


def test_cursor_detects_loss_and_repeats():
    cursor = StreamCursor()
    assert [cursor.advance(seq) for seq in (0, 1, 1, 0, 3, 2, 3)] == [
        "ok", "ok", "duplicate", "duplicate", "gap", "ok", "ok",
    ]  # fmt: skip
    assert cursor.expected == 4
    assert StreamCursor().advance(5) == "gap"
    cursor.resume(9)
    assert cursor.advance(9) == "ok"
    with pytest.raises(ValueError, match="got -1"):
        cursor.advance(-1)


@given(st.lists(st.integers(0, 8), max_size=40))
def test_cursor_accepts_each_number_once_in_order(numbers):
    cursor = StreamCursor()
    accepted = [n for n in numbers if cursor.advance(n) == "ok"]
    assert accepted == list(range(len(accepted)))


def test_media_become_tiers():
    event = one(stored(size=3, parent=b"p"))
    assert isinstance(event, BlocksStored)
    assert (event.worker, event.tier, event.engine_hashes) == ("w", "device", (11, 12))
    assert (event.parent_engine_hash, event.block_tokens, event.salt) == (b"p", 3, None)
    assert np.array_equal(event.token_ids, range(6))
    assert one(stored(medium="CPU")).tier == "host"
    assert one(stored(medium="STORAGE")).tier == "disk"
    assert one(removed(1, b"x")) == BlocksRemoved("w", "device", (1, b"x"))
    assert one(removed(1, medium="CPU")) == BlocksRemoved("w", "host", (1,))


def test_first_block_of_a_sequence_gives_its_salt():
    assert one(stored()).salt == 0
    assert one(stored(extra_keys=[["t1"], None])).salt == salt_of("t1")
    assert one(stored(parent=9, extra_keys=[None, None])).salt is None
    assert one(stored(medium="CPU")).salt is None
    lora = stored(lora_name="a", extra_keys=[["a", "t1"], ["a"]])
    assert one(lora).salt == salt_of("t1", "a")
    assert one(stored(lora_name="a", extra_keys=[["a"], ["a"]])).salt == salt_of(None, "a")


def test_clearing_covers_both_tiers():
    assert one({"type": "AllBlocksCleared"}) == TierCleared("w", None)


def test_skipped_events_are_counted_by_reason():
    skipped = Counter()
    events = [
        {"type": "BlockMoved", "to": 3},
        stored(medium="TAPE"),
        stored(medium=None),
        removed(1, medium="CPU", locality="REMOTE"),
        stored(group_idx=1),
        stored(token_ids=[1, 2]),
        stored(extra_keys=[[["image", 0]], None]),
        removed(1, group_idx=0, locality="LOCAL", unheard_of=1),
    ]
    assert decode_batch(batch(*events), "w", skipped) == [BlocksRemoved("w", "device", (1,))]
    assert skipped == {
        "type:BlockMoved": 1,
        "medium:TAPE": 1,
        "medium:None": 1,
        "remote": 1,
        "other_group": 1,
        "sparse": 1,
        "multimodal": 1,
    }


def test_removals_in_a_row_are_joined_and_nothing_else_is():
    one, other = (BlocksRemoved("w", "device", (name,)) for name in (1, b"2"))
    apart = [TierCleared("w", None), BlocksRemoved("w", "host", (3,)), one]
    assert joined([one, other, *apart]) == [BlocksRemoved("w", "device", (1, b"2")), *apart]
    many = [BlocksRemoved("w", "device", (name,), 1, 2) for name in range(100)]
    assert [len(event.engine_hashes) for event in joined(many)] == [64, 36]
    assert {(event.rank, event.group) for event in joined(many)} == {(1, 2)}
    assert joined([]) == []


def of_group(index, kind, window=None, **more):
    """A store in a cache group; of two blocks of a window, or states, the first is left out."""
    sparse = {} if "full" in kind or "mla_attention" in kind else {"hashes": (12,)}
    told = {"group_idx": index, "kv_cache_spec_kind": kind, "kv_cache_spec_sliding_window": window}
    return stored(token_ids=[0, 1, 2, 3], **sparse, **told, **more)


KIMI_K3 = [of_group(index, "mamba") for index in range(3)] + [of_group(3, "mla_attention")]
GPT_OSS = [of_group(0, "sliding_window", 128), of_group(1, "full_attention")]
QWEN3_NEXT = [of_group(0, "full_attention")] + [of_group(index, "mamba") for index in (1, 2, 3)]
DEEPSEEK_V4 = [
    of_group(0, "mla_attention"),
    of_group(1, "sliding_window_mla", 128),
    of_group(2, "sliding_window_mla", 8),
]


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (KIMI_K3, [(0, None, 4), (1, 1, 0), (2, 1, 0), (3, 1, 0)]),
        (GPT_OSS, [(0, None, 4), (1, 127, 0)]),
        (QWEN3_NEXT, [(0, None, 4), (2, 1, 0), (3, 1, 0), (4, 1, 0)]),
        (DEEPSEEK_V4, [(0, None, 4), (2, 127, 0), (3, 7, 0)]),
    ],
    ids=["kimi-k3", "gpt-oss", "qwen3-next", "deepseek-v4"],
)
def test_groups_of_a_hybrid_model_are_all_kept(events, expected):
    counts = Counter()
    rank, decoded = decode(batch(*events, rank=2), "w", counts, CacheGroups())
    # The group that describes all blocks comes first, wherever it stood.
    assert [(one.group, one.last_tokens, len(one.token_ids)) for one in decoded] == expected
    assert {one.rank for one in decoded} == {rank} == {2}
    kinds = Counter(f"priced_{one['kv_cache_spec_kind']}" for one in events)
    assert counts == kinds


def test_removal_is_of_the_group_that_a_store_described():
    groups, counts = CacheGroups(), Counter()
    gone = [removed(7, group_idx=index) for index in (0, 1, 2, None)]
    assert decode(batch(*gone), "w", counts, groups).events == [
        BlocksRemoved("w", "device", (7,)), BlocksRemoved("w", "device", (7,)),
    ]  # fmt: skip
    assert counts == {"other_group": 2}
    decode(batch(*GPT_OSS), "w", counts, groups)
    assert [one.group for one in decode(batch(*gone), "w", counts, groups).events] == [1, 0, 0]
    # Another rank's groups are told apart.
    decoded = decode(batch(*gone, rank=1), "w", counts, groups).events
    assert [(one.rank, one.group) for one in decoded] == [(1, 0), (1, 0)]


def test_stores_keep_their_place_between_removals():
    groups = CacheGroups()
    events = [*GPT_OSS, removed(12, group_idx=0), of_group(0, "sliding_window", 128), *GPT_OSS]
    decoded = decode(batch(*events), "w", Counter(), groups).events
    assert [(type(one).__name__[6:], one.group) for one in decoded] == [
        ("Stored", 0), ("Stored", 1), ("Removed", 1), ("Stored", 0), ("Stored", 1), ("Stored", 1),
    ]  # fmt: skip


def test_kinds_that_are_not_priced_are_counted():
    counts = Counter()
    events = [of_group(0, "full_attention"), of_group(1, "chunked_local_attention_of_full")]
    decoded = decode(batch(*events, removed(1, group_idx=1)), "w", counts, CacheGroups()).events
    assert [one.group for one in decoded] == [0]
    assert counts == {"priced_full_attention": 1, "unpriced_chunked_local_attention_of_full": 2}


def test_restarted_server_may_have_other_groups():
    groups = CacheGroups()
    decode(batch(*GPT_OSS), "w", Counter(), groups)
    decoded = decode(batch(*QWEN3_NEXT), "w", Counter(), groups).events
    assert [one.group for one in decoded] == [0, 2, 3, 4]


def test_second_group_with_the_whole_prefix_is_a_further_one():
    events = [of_group(index, "full_attention") for index in (0, 1)]
    decoded = decode(batch(*events), "w", Counter(), CacheGroups()).events
    assert [(one.group, one.last_tokens) for one in decoded] == [(0, None), (2, None)]


def test_groups_that_a_stream_may_name_are_bounded():
    groups, counts = CacheGroups(), Counter()
    for rank in range(80):
        decode(batch(*KIMI_K3, rank=rank), "w", counts, groups)
    assert len(groups._known) == 256
    assert counts["other_group"] == 4 * 80 - 256


def test_blocks_before_an_image_are_kept():
    event = one(stored(hashes=(1, 2, 3), extra_keys=[["t"], [["image", 1]], None]))
    assert event.engine_hashes == (1,)
    assert len(event.token_ids) == 2 and event.salt == salt_of("t")


def test_keys_without_end_are_no_text():
    event = one(stored(hashes=(1, 2), extra_keys=[None, ["t"] * 1000]))
    assert event.engine_hashes == (1,)


def test_host_blocks_without_tokens_are_passed_on():
    event = one(stored(hashes=(7,), size=0, medium="CPU", token_ids=[]))
    assert (event.engine_hashes, len(event.token_ids)) == ((7,), 0)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xff\x00",
        msgspec.msgpack.encode({"ts": 1}),
        msgspec.msgpack.encode([1.0, 3]),
        batch({"block_hashes": []}),
        batch({"type": "BlockStored", "block_hashes": [1]}),
        batch(stored(token_ids=["a"] * 4)),
        batch(stored(token_ids=[2**63] * 4)),
        # Lists that would cost gigabytes once they are Python's.
        batch(stored(hashes=[1] * (1 << 18), token_ids=[])),
        batch(stored(token_ids=[1] * (1 << 22))),
        batch(stored(extra_keys=[[]] * (1 << 18))),
        batch(*[{}] * (1 << 17)),
        batch(stored(), rank=1 << 10),
        batch(stored(), rank=-1),
        batch(stored(group_idx=-1)),
        batch(removed(1, group_idx=256)),
    ],
)
def test_malformed_payloads_name_the_worker(payload):
    with pytest.raises(ValueError, match=r"malformed KV event.* from worker w3: ."):
        decode_batch(payload, "w3")


@pytest.mark.vllm
def test_decode_reads_what_vllm_encodes():
    """Names relied on: KVEventBatch, BlockStored, BlockRemoved, AllBlocksCleared, MEDIUM_*."""
    kv_events = pytest.importorskip("vllm.distributed.kv_events")
    hasher = PrefixHasher(4, secret_from_seed("tests"))
    index, tokens = PrefixIndex(hasher, 100), list(range(100, 112))

    def make(medium, keys, hashes=(2**64 - 1, b"\x00" * 32, 3), parent=None, ids=tokens):
        return kv_events.BlockStored(
            block_hashes=list(hashes),
            parent_block_hash=parent,
            token_ids=ids,
            block_size=4,
            lora_id=None,
            medium=medium,
            lora_name=None,
            extra_keys=keys,
            group_idx=0,
            kv_cache_spec_kind="full_attention" if medium == "CPU" else None,
        )

    def send(*events):
        sent = kv_events.KVEventBatch(ts=1.5, events=list(events), data_parallel_rank=0)
        payload, skipped = msgspec.msgpack.Encoder().encode(sent), Counter()
        for event in decode_batch(payload, "w", skipped):
            index.handle(event)
        assert set(skipped) <= {"priced_full_attention"}

    def ask(salt):
        return match_worker(index, hasher.prefix_hashes(tokens, salt_of(salt)), "w")

    device, host = kv_events.MEDIUM_GPU, kv_events.MEDIUM_CPU
    send(
        make(device, [("tenant",), None], hashes=(2**64 - 1, b"\x00" * 32), ids=tokens[:8]),
        make(device, [None], hashes=(3,), parent=b"\x00" * 32, ids=tokens[8:]),
    )
    assert (ask("tenant"), ask(None)) == (Match(3, 0), Match(0, 0))
    send(make(host, None))
    send(kv_events.BlockRemoved(block_hashes=[3, b"\x00" * 32], medium=device, group_idx=0))
    assert (ask("tenant"), ask(None)) == (Match(1, 2), Match(0, 0))
    send(kv_events.BlockRemoved(block_hashes=[3], medium=host, group_idx=0))
    assert ask("tenant") == Match(1, 1)
    send(kv_events.AllBlocksCleared())
    assert ask("tenant") == Match(0, 0)
    unsalted = make(device, None)
    send(unsalted)
    assert (ask("tenant"), ask(None)) == (Match(0, 0), Match(3, 0))


def sglang(*rows, rank=None):
    """A payload as SGLang's publisher encodes it: events are arrays, their kind first."""
    return msgspec.msgpack.encode([1.0, list(rows), rank])


def page(*hashes, parent=None, medium="GPU", tokens=None, size=2, more=()):
    tokens = list(range(len(hashes) * size)) if tokens is None else tokens
    told = [] if medium == "none" else [medium]
    return ["BlockStored", list(hashes), parent, tokens, size, None, *told, *more]


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        ("none", "device"), (None, "device"), ("GPU", "device"), ("CPU_PINNED", "host"),
        ("CPU_TIER1", "host"), ("cpu", "host"), ("DISK", "disk"), ("CPU_TIER2", "disk"),
        ("EXTERNAL", "disk"),
    ],
)  # fmt: skip
def test_media_of_sglang_and_dynamo_become_tiers(medium, tier):
    rank, events = decode(sglang(page(-7, 8, medium=medium), rank=3), "w", Counter(), CacheGroups())
    assert rank == 3
    assert [(one.tier, one.engine_hashes, one.rank) for one in events] == [(tier, (-7, 8), 3)]
    assert np.array_equal(events[0].token_ids, range(4))


def test_arrays_of_sglang_say_what_maps_say():
    rows = [page(1, 2), page(3, parent=2), ["BlockRemoved", [1], "GPU"], ["BlockRemoved", [2]]]
    maps = [stored((1, 2)), stored((3,), parent=2), removed(1), removed(2)]
    theirs, ours = (decode_batch(payload, "w") for payload in (sglang(*rows), batch(*maps)))
    assert list(map(repr, theirs)) == list(map(repr, ours))
    assert decode_batch(sglang(["AllBlocksCleared"]), "w") == [TierCleared("w", None)]


def test_salts_of_sglang_set_sequences_apart():
    salted = page(1, more=[{"cache_salt": "t1", "unheard_of": 3}])
    events = decode_batch(sglang(salted, page(2, medium="CPU_PINNED")), "w")
    assert [one.salt for one in events] == [salt_of("t1"), None]
    told = [stored(cache_salt=salt, medium="CPU_PINNED") for salt in ("t1", None)]
    assert [one.salt for one in decode_batch(batch(*told), "w")] == [salt_of("t1"), 0]
    assert one(stored(cache_salt="t1", parent=9)).salt is None


def test_pairs_of_tokens_count_as_their_first():
    pairs = [(5, 6), (6, 7), (7, 8), (8, 9)]
    (event,) = decode_batch(sglang(page(1, 2, tokens=pairs)), "w")
    assert np.array_equal(event.token_ids, [5, 6, 7, 8])
    with pytest.raises(ValueError, match="pairs"):
        decode_batch(sglang(page(1, tokens=[5, (6, 7)])), "w")


def test_unknown_kinds_that_a_stream_may_name_are_bounded():
    counts = Counter()
    rows = [[f"Kind{number}" + "x" * 100] for number in range(200)]
    assert decode_batch(sglang(*rows), "w", counts) == []
    assert len(counts) <= 65
    assert max(map(len, counts)) <= 64
    assert counts.total() == 200


@given(st.data())
def test_hits_of_sglang_batches_are_those_of_the_batches(data):
    """A tree of pages as HiCache moves them; hits equal the longest prefix held, page by page."""
    size, counts = 4, Counter()
    hasher = PrefixHasher(size, secret_from_seed("s"))
    index, groups = PrefixIndex(hasher, 1000), CacheGroups()
    prompts = [[*range(20)], [*range(8), *range(100, 112)], [*range(200, 220)]]
    names = [[hash(tuple(p[: (i + 1) * size])) for i in range(5)] for p in prompts]
    held = {"GPU": set(), "CPU_PINNED": set()}
    for _ in range(data.draw(st.integers(1, 12))):
        which, medium = data.draw(st.integers(0, 2)), data.draw(st.sampled_from(sorted(held)))
        known, prompt = names[which], prompts[which]
        if data.draw(st.booleans()):
            # HiCache backs up what is on the device. What is there already is not told again.
            rows = [
                page(known[i], parent=known[i - 1] if i else None, size=size, medium=m,
                     tokens=prompt[i * size : (i + 1) * size])
                for m in ("GPU", "CPU_PINNED") if m in ("GPU", medium)
                for i in range(data.draw(st.integers(1, 5))) if known[i] not in held[m]
            ]  # fmt: skip
            for row in rows:
                held[row[6]] |= set(row[1])
        else:
            start = data.draw(st.integers(0, 4))
            gone = [name for name in known[start:] if name in held[medium]]
            rows = [["BlockRemoved", gone, medium]] if gone else []
            held[medium] -= set(gone)
        for event in decode(sglang(*rows), "w", counts, groups).events:
            index.handle(event)
    for known, prompt in zip(names, prompts, strict=True):
        on_device = next((i for i, name in enumerate(known) if name not in held["GPU"]), 5)
        behind = [name in held["CPU_PINNED"] for name in known[on_device:]]
        in_host = next((i for i, is_held in enumerate(behind) if not is_held), len(behind))
        hashes = hasher.prefix_hashes(np.array(prompt))
        assert match_worker(index, hashes, "w")[:2] == (on_device, in_host)

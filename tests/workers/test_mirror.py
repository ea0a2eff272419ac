"""A snapshot of the mirror gives a router the same index as the events it stands for."""

import random

import msgspec
import pytest
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

from kappa_router.index.prefix_hash import PrefixHasher, salt_of, secret_from_seed
from kappa_router.index.prefix_index import PrefixIndex
from kappa_workers.mirror import KvMirror
from tests.router.building import match_worker
from tests.router.kv_batches import decode_batch

pytestmark = pytest.mark.vllm

SIZE = 4
HASHER = PrefixHasher(SIZE, secret_from_seed("mirror"))
SALTS = (None, "tenant-a")


def key(tokens, salt):
    return hash((tuple(tokens), salt)) & (2**63 - 1)


def stored(tokens, start=0, medium="GPU", salt=None):
    """Blocks [start, end) of a prefix, as vLLM announces them."""
    ends = range((start + 1) * SIZE, len(tokens) + 1, SIZE)
    extra = [(salt,) if salt and end == SIZE else None for end in ends]
    return BlockStored(
        block_hashes=[key(tokens[:end], salt) for end in ends],
        parent_block_hash=key(tokens[: start * SIZE], salt) if start else None,
        token_ids=list(tokens[start * SIZE :]),
        block_size=SIZE,
        lora_id=None,
        medium=medium,
        lora_name=None,
        extra_keys=extra if any(extra) else None,
    )


def removed(*prefixes, medium="GPU", salt=None):
    return BlockRemoved(block_hashes=[key(p, salt) for p in prefixes], medium=medium)


def payload(*events):
    return msgspec.msgpack.encode(KVEventBatch(ts=1.0, events=list(events)))


class Pair:
    """A mirror and the index that heard every event live."""

    def __init__(self):
        self.mirror, self.live = KvMirror(), PrefixIndex(HASHER, 10_000)

    def tell(self, *events):
        self.mirror.apply(payload(*events))
        self._hear(self.live, payload(*events))

    @staticmethod
    def _hear(index, message):
        for event in decode_batch(message, "w"):
            index.handle(event)

    def rebuilt(self):
        index = PrefixIndex(HASHER, 10_000)
        for message in self.mirror.snapshot():
            self._hear(index, message)
        return index


def match(index, tokens, salt=None):
    hashes = HASHER.prefix_hashes(tokens, salt_of(salt) if salt else 0)
    return match_worker(index, hashes, "w")[:2]


LONG = list(range(5 * SIZE))


@pytest.mark.parametrize(
    ("gone", "found"),
    [
        ((LONG, LONG[: 4 * SIZE]), (3, 2)),
        (tuple(LONG[:end] for end in range(SIZE, len(LONG) + 1, SIZE)), (0, 5)),  # host alone
    ],
)
def test_snapshot_rebuilds_device_and_host_blocks(gone, found):
    pair = Pair()
    pair.tell(stored(LONG), stored(LONG, medium="CPU"))
    pair.tell(removed(*gone))
    assert match(pair.rebuilt(), LONG) == match(pair.live, LONG) == found


def test_a_block_held_twice_on_the_device_survives_one_removal():
    pair = Pair()
    pair.tell(stored(LONG[:SIZE]), stored(LONG[:SIZE]))
    assert match(pair.rebuilt(), LONG) == (1, 0)
    late = pair.rebuilt()
    pair.tell(removed(LONG[:SIZE]))
    assert match(pair.rebuilt(), LONG) == match(pair.live, LONG) == (1, 0)
    # A router that came in between hears the same removal.
    for event in decode_batch(payload(removed(LONG[:SIZE])), "w"):
        late.handle(event)
    assert match(late, LONG) == (1, 0)


def test_salts_keep_tenants_apart_in_a_snapshot():
    pair = Pair()
    pair.tell(stored(LONG, salt="tenant-a"), stored(LONG, medium="CPU", salt="tenant-a"))
    pair.tell(removed(*(LONG[:e] for e in range(SIZE, 21, SIZE)), salt="tenant-a"))
    index = pair.rebuilt()
    assert match(index, LONG, "tenant-a") == (0, 5)
    assert match(index, LONG) == match(index, LONG, "tenant-b") == (0, 0)


def test_clearing_forgets_everything():
    pair = Pair()
    pair.tell(stored(LONG))
    pair.tell(AllBlocksCleared())
    assert len(pair.mirror) == 0 and pair.mirror.snapshot() == []
    pair.tell(stored(LONG))
    pair.mirror.clear()
    assert pair.mirror.snapshot() == []


def test_mirror_skips_blocks_without_tokens():
    pair = Pair()
    named = stored(LONG)
    named.token_ids = []
    pair.tell(named)
    assert len(pair.mirror) == 0


def test_large_states_come_in_batches_parents_first():
    pair = Pair()
    tokens = list(range(700 * SIZE))
    # Children announced before their parents, as after a partial loss.
    pair.tell(stored(tokens[: 300 * SIZE]))
    pair.tell(stored(tokens, start=300))
    assert len(pair.mirror.snapshot()) == 2
    assert match(pair.rebuilt(), tokens) == (700, 0)


@pytest.mark.parametrize("seed", range(20))
def test_any_history_gives_the_live_index(seed):
    rng = random.Random(seed)
    pair = Pair()
    prompts = [[rng.randrange(3) for _ in range(SIZE * rng.randint(1, 6))] for _ in range(12)]
    held = {"GPU": {}, "CPU": {}}  # medium -> (prefix, salt) -> copies
    for _ in range(150):
        tokens, salt = rng.choice(prompts), rng.choice(SALTS)
        medium = rng.choice(("GPU", "CPU"))
        ends = range(SIZE, len(tokens) + 1, SIZE)
        prefixes = [(tuple(tokens[:end]), salt) for end in ends]
        here = held[medium]
        if rng.random() < 0.6:
            if medium == "CPU" and not all(held["GPU"].get(p) for p in prefixes):
                continue  # an engine offloads what its device holds
            start = next((i for i, p in enumerate(prefixes) if not here.get(p)), None)
            if rng.random() < 0.2 and medium == "GPU":
                start = 0  # computed twice at once: a second copy of each block
            if start is None:
                continue
            pair.tell(stored(tokens, start, medium, salt))
            for prefix in prefixes[start:]:
                here[prefix] = 1 if medium == "CPU" else here.get(prefix, 0) + 1
        else:
            victims = [p for p in here if here[p]]
            if victims:
                # The last of a chain leaves first, as in vLLM's eviction order.
                prefix, owner = max(
                    rng.sample(victims, min(4, len(victims))), key=lambda p: len(p[0])
                )
                pair.tell(removed(prefix, medium=medium, salt=owner))
                here[prefix, owner] -= 1
    rebuilt = pair.rebuilt()
    for tokens in prompts:
        for salt in SALTS:
            assert match(rebuilt, tokens, salt) == match(pair.live, tokens, salt)


def test_an_adapters_blocks_are_rebuilt_as_that_adapters():
    pair = Pair()
    event = stored(LONG)
    event.lora_name, event.lora_id = "fine", 1
    event.extra_keys = [("fine", "tenant-a")] + [("fine",)] * 4
    pair.tell(event)
    theirs = HASHER.prefix_hashes(LONG, salt_of("tenant-a", "fine"))
    for index in (pair.live, pair.rebuilt()):
        assert match_worker(index, theirs, "w")[:2] == (5, 0)
        assert match(index, LONG, "tenant-a") == match(index, LONG) == (0, 0)


@pytest.mark.parametrize("first", ["described", "named"])
def test_cache_groups_are_rebuilt_each_for_itself(first):
    pair = Pair()
    whole, states = stored(LONG), stored(LONG)
    whole.group_idx, whole.kv_cache_spec_kind = 1, "mla_attention"
    states.group_idx, states.kv_cache_spec_kind = 0, "mamba"
    states.block_hashes = states.block_hashes[2:4]
    pair.tell(*((whole, states) if first == "described" else (states, whole)))
    assert match(pair.rebuilt(), LONG) == match(pair.live, LONG) == (4, 0)
    gone = removed(LONG[: 4 * SIZE])
    gone.group_idx = 0
    pair.tell(gone)
    assert match(pair.rebuilt(), LONG) == match(pair.live, LONG) == (3, 0)
    pair.tell(AllBlocksCleared())
    assert len(pair.mirror) == 0

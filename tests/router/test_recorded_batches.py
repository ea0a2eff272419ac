"""KV events as a real vLLM published them: the index expects what the engine then reports as found.

`recorded/` has, of each of 40 prompts that came one after the other to vLLM 0.29 on a CPU, the
prompt, its cached tokens as the engine reported them, and the batches that followed: of a model
with sliding windows beside full attention (Gemma 3's layers, random weights), of one with two LoRA
adapters, and of two data-parallel ranks behind one port, named by `x-data-parallel-rank`.
"""

import base64
import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from kappa_router.index.kv_event_types import CacheGroups, decode
from kappa_router.index.prefix_hash import PrefixHasher, salt_of, secret_from_seed
from kappa_router.index.prefix_index import PrefixIndex
from tests.router.building import match_worker

RECORDED = sorted(Path(__file__).with_name("recorded").glob("*.json.gz"))


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name.split(".")[0])
def test_index_expects_what_the_engine_found(path):
    with gzip.open(path, "rt", encoding="utf-8") as file:
        recorded = json.load(file)
    size, groups, counts = recorded["block_tokens"], CacheGroups(), Counter()
    hasher = PrefixHasher(size, secret_from_seed("recorded"))
    index, hits = PrefixIndex(hasher, 10_000), 0
    for row in recorded["rows"]:
        tokens, worker = row["tokens"], f"w#{row.get('rank', 0)}"
        hashes = hasher.prefix_hashes(tokens, salt_of(None, row["adapter"]))
        # The last token is computed in any case.
        device, behind, _ = match_worker(index, hashes, worker, (len(tokens) - 1) // size)
        assert not behind and abs(device * size - row["cached"]) <= size
        hits += device > 0
        for payload in map(base64.b64decode, row["events"]):
            for event in decode(payload, worker, counts, groups).events:
                index.handle(event)
    assert hits >= 20

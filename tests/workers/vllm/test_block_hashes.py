"""Blocks of prompts have vLLM's hashes, and known ones are not computed again."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.engine import core
from vllm.v1.request import Request

from kappa_workers.vllm import block_hashes
from kappa_workers.vllm.block_hashes import KnownHashes

pytestmark = pytest.mark.vllm

BLOCK = 32
RUN = 1024
init_none_hash(sha256)
STOCK = get_request_block_hasher(BLOCK, sha256)
TOKENS = np.random.default_rng(1).integers(0, 100_000, 6 * RUN).tolist()


class Counting:
    """vLLM's hasher; how many blocks it computed at a time."""

    def __init__(self):
        self.computed = []

    def __call__(self, request):
        made = STOCK(request)
        self.computed.append(len(made))
        return made


def hashed(hasher, tokens, salt=None, lora=None):
    lora = LoRARequest(lora, 1, "/x") if lora else None
    more = {"lora_request": lora, "cache_salt": salt, "block_hasher": hasher}
    return Request("r", list(tokens), SamplingParams(max_tokens=1), None, **more).block_hashes


prompts = st.tuples(
    st.integers(0, 5 * RUN), st.integers(0, 2 * RUN), st.sampled_from([None, "a", "b"]),
    st.sampled_from([None, "x"]),
)  # fmt: skip


@given(asked=st.lists(prompts, min_size=1, max_size=5))
def test_any_prompts_have_vllms_hashes(asked):
    known = KnownHashes(STOCK, BLOCK, most_bytes=40_000)
    for same, other, salt, lora in asked:
        tokens = TOKENS[:same] + TOKENS[-other:] if other else TOKENS[:same]
        tokens = tokens or [1]
        assert hashed(known, tokens, salt, lora) == hashed(STOCK, tokens, salt, lora)


def test_only_new_blocks_are_computed():
    counting = Counting()
    known = KnownHashes(counting, BLOCK)
    first = hashed(known, TOKENS[: 3 * RUN + 40])
    assert hashed(known, TOKENS[: 4 * RUN])[: 3 * RUN // BLOCK] == first[: 3 * RUN // BLOCK]
    assert counting.computed == [3 * RUN // BLOCK + 1, RUN // BLOCK]


def test_a_prompt_with_another_salt_profits_of_nothing():
    counting = Counting()
    known = KnownHashes(counting, BLOCK)
    for salt in ("a", "b"):
        hashed(known, TOKENS[: 2 * RUN], salt)
    assert counting.computed == [2 * RUN // BLOCK] * 2


def test_blocks_that_an_answer_fills_go_vllms_way():
    known, answer = KnownHashes(STOCK, BLOCK), TOKENS[: 3 * BLOCK]
    made = Request("r", TOKENS[:RUN], SamplingParams(max_tokens=99), None, block_hasher=known)
    made.append_output_token_ids(answer)
    assert made.block_hashes == hashed(STOCK, TOKENS[:RUN] + answer)


def test_what_is_remembered_is_bounded():
    known = KnownHashes(STOCK, BLOCK, most_bytes=30_000)
    hashed(known, TOKENS)
    assert 0 < len(known._runs) * 4 * RUN < 30_000


def test_the_engine_is_given_it_once(monkeypatch):
    monkeypatch.setattr(core, "get_request_block_hasher", get_request_block_hasher)
    block_hashes.install()
    block_hashes.install()
    made = core.get_request_block_hasher(BLOCK, sha256)
    assert isinstance(made, KnownHashes) and not isinstance(made._stock, KnownHashes)

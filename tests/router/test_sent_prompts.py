"""What engines hold by what was sent to them, with caches and blocks counted by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kappa_router import sent_prompts
from kappa_router.index.prefix_hash import PrefixHasher
from kappa_router.index.prefix_index import PrefixIndex
from kappa_router.sent_prompts import CacheSize, SentBlocks, prompt_tokens

SIZE = 2


class Engine:
    """An engine's caches and the index that follows them."""

    def __init__(self, **blocks):
        self.hasher = PrefixHasher(SIZE, 1)
        self.index = PrefixIndex(self.hasher, 1000)
        self.blocks = SentBlocks("a", CacheSize(SIZE, **blocks))

    def hashes(self, letter, blocks):
        return self.hasher.prefix_hashes([ord(letter)] * SIZE * blocks)

    def send(self, letter, blocks):
        return self.blocks.send(self.index, self.hashes(letter, blocks))

    def done(self, letter, blocks):
        self.blocks.ended(self.send(letter, blocks))

    def held(self, letter, blocks):
        """Leading blocks on the device, and further ones in the host tier."""
        return tuple(self.index.match_columns(self.hashes(letter, blocks))[:2, 0].tolist())


def test_prompts_sent_are_held():
    engine = Engine()
    engine.done("x", 3)
    assert engine.held("x", 5) == (3, 0)
    assert engine.held("y", 5) == (0, 0)


def test_full_device_drops_the_end_of_its_oldest_prompt():
    engine = Engine(device_blocks=5)
    engine.done("x", 3)
    engine.done("y", 4)
    assert engine.held("x", 3) == (1, 0)
    assert engine.held("y", 4) == (4, 0)


def test_using_a_prompt_again_keeps_it():
    engine = Engine(device_blocks=6)
    for letter in "xyx":
        engine.done(letter, 3)
    engine.done("z", 3)
    assert [engine.held(letter, 3)[0] for letter in "xyz"] == [3, 0, 3]


def test_blocks_that_left_the_device_are_in_the_host_tier():
    engine = Engine(device_blocks=3, host_blocks=6)
    engine.done("x", 3)
    engine.done("y", 3)
    assert engine.held("x", 3) == (0, 3)
    assert engine.held("y", 3) == (3, 0)
    engine.done("z", 3)
    assert engine.held("x", 3) == (0, 0)


def test_engine_that_finds_less_holds_less():
    # Of four prompts of twenty blocks only the last three were still there.
    engine = Engine(device_blocks=1000)
    for letter in "uxyz":
        engine.done(letter, 20)
    again = engine.send("u", 20)
    assert engine.blocks.found(engine.index, again, 0)
    assert [engine.held(letter, 20)[0] for letter in "uxyz"] == [20, 20, 20, 20]
    assert engine.blocks.size["device"] == 80  # Three prompts, and the recomputed one.
    engine.blocks.ended(again)
    engine.done("v", 20)
    assert engine.held("x", 20) == (0, 0)


def test_blocks_older_than_a_missing_one_are_gone_too():
    engine = Engine(device_blocks=1000)
    for letter in "uxy":
        engine.done(letter, 20)
    engine.blocks.found(engine.index, engine.send("x", 20), 0)
    assert [engine.held(letter, 20)[0] for letter in "uxy"] == [0, 20, 20]


def test_size_that_was_too_small_grows_back_to_its_limit():
    engine = Engine(device_blocks=90)
    for letter in "ux":
        engine.done(letter, 20)
    engine.blocks.found(engine.index, engine.send("u", 20), 0)
    assert engine.blocks.size["device"] == 40
    for _ in range(100):
        engine.blocks.found(engine.index, engine.send("x", 20), 20)
    assert engine.blocks.size["device"] == 90


def test_answer_halves_the_supposed_cache_at_most():
    engine = Engine(device_blocks=1000)
    for letter in "wxyz":
        engine.done(letter, 20)
    # The latest prompt is missing: a cache of twenty blocks would have been the reason.
    engine.blocks.found(engine.index, engine.send("z", 20), 0)
    assert [engine.held(letter, 20)[0] for letter in "wxyz"] == [0, 0, 0, 20]
    assert engine.blocks.size["device"] == 40


@pytest.mark.parametrize("ended", [False, True])
def test_block_still_being_computed_may_be_missing(ended):
    engine = Engine(device_blocks=1000)
    first = engine.send("x", 20)
    second = engine.send("x", 20)
    if ended:
        engine.blocks.ended(first)
    assert not engine.blocks.found(engine.index, second, 0)
    assert engine.blocks.size["device"] == 1000


@pytest.mark.parametrize(("blocks", "contradicts"), [(12, False), (11, True)])
def test_engine_with_larger_blocks_may_round_the_end_away(blocks, contradicts):
    engine = Engine(device_blocks=1000)
    engine.done("x", 20)
    assert engine.blocks.found(engine.index, engine.send("x", 20), blocks) is contradicts


def test_cleared_engine_expects_nothing():
    engine = Engine()
    engine.done("x", 3)
    engine.blocks.clear()
    assert engine.send("x", 3).before.tolist() == [0, 0, 0]


def test_caches_are_forgotten_once_when_numbers_run_out(monkeypatch):
    monkeypatch.setattr(sent_prompts, "_LAST_NUMBER", 2)
    engine = Engine(device_blocks=10, host_blocks=10)
    for letter in "xyz":
        engine.done(letter, 3)
    assert [engine.held(letter, 3) for letter in "xyz"] == [(0, 0), (0, 0), (3, 0)]
    assert engine.send("z", 3).before.tolist() == [1, 1, 1]


def test_dropped_blocks_leave_the_index_at_once(monkeypatch):
    engine, drops = Engine(device_blocks=25), []
    monkeypatch.setattr(engine.index, "drop", lambda *dropped: drops.append(len(dropped[2])))
    for letter in "xyz":
        engine.done(letter, 10)
    engine.done("w", 20)
    assert drops == [5, 20]


# -- beside one block after another --------------------------------------------------------------


class SlowTier:
    """A tier block by block: by name, the request that used it last, least recently used first."""

    def __init__(self, most):
        self.limit, self.size, self.blocks = most, most, {}

    def use(self, names, number):
        before = [self.blocks.pop(name, 0) for name in names]
        for name in reversed(names):
            self.blocks[name] = number
        return before

    def trim(self):
        while len(self.blocks) > self.size:
            del self.blocks[next(iter(self.blocks))]

    def missing(self, number):
        held = len(self.blocks)
        self.blocks = {name: last for name, last in self.blocks.items() if last > number}
        self.size = min(self.size, max(len(self.blocks), held / 2, 1))


def leading(names, tier):
    return next((i for i, name in enumerate(names) if name not in tier.blocks), len(names))


@given(st.integers(0, 2**32), st.integers(2, 60), st.sampled_from([0, 5, 90]))
@settings(max_examples=80, deadline=None)
def test_blocks_held_equal_following_each_block(seed, device, host):
    rng, engine = np.random.default_rng(seed), Engine(device_blocks=device, host_blocks=host)
    slow = {"device": SlowTier(device)} | ({"host": SlowTier(host)} if host else {})
    prompts = [engine.hasher.prefix_hashes(rng.integers(0, 2, 80)) for _ in range(3)]
    # Conversations that begin alike, and some that do not.
    tokens = rng.integers(0, 5, 80)
    for _ in range(3):
        tokens[rng.integers(10, 80) :] += 7
        prompts.append(engine.hasher.prefix_hashes(tokens))
    sent = []
    for number in range(1, 60):
        prompt = prompts[rng.integers(len(prompts))][: rng.integers(0, 41)]
        sent.append(engine.blocks.send(engine.index, prompt))
        names = prompt.tolist()
        each = [tier.use(names, number) for tier in slow.values()]
        used = [max(numbers) for numbers in zip(*each, strict=True)]
        for tier in slow.values():
            tier.trim()
        assert sent[-1].before.tolist() == used
        if rng.random() < 0.7:
            engine.blocks.ended(sent[-1])
        if rng.random() < 0.3:
            found = int(rng.integers(0, len(prompt) + 1))
            short = engine.blocks.found(engine.index, sent[-1], found)
            for tier in slow.values():
                if short:
                    tier.missing(used[found])
                elif found >= (used.index(0) if 0 in used else len(used)) - 8:
                    tier.size = min(tier.size * 1.02, tier.limit)
        for prompt in prompts:
            names = prompt.tolist()
            first = leading(names, slow["device"])
            more = leading(names[first:], slow["host"]) if host else 0
            assert engine.index.match_columns(prompt)[:2, 0].tolist() == [first, more]
        sizes = {name: tier.size for name, tier in slow.items()}
        assert engine.blocks.size == {"host": 0} | sizes


# -- prompts -------------------------------------------------------------------------------------


def test_four_bytes_are_a_token_and_the_rest_waits():
    assert prompt_tokens({"prompt": "abcdefg"}).tolist() == [int.from_bytes(b"abcd", "little")]


def test_messages_extend_a_prompt():
    messages = [{"role": "user", "content": "first question"}]
    one = prompt_tokens({"messages": messages})
    two = prompt_tokens({"messages": [*messages, {"role": "assistant", "content": "x"}]})
    assert len(two) > len(one)
    assert np.array_equal(two[: len(one)], one)


def test_order_of_message_keys_changes_nothing():
    one = prompt_tokens({"messages": [{"role": "user", "content": "hello there"}]})
    two = prompt_tokens({"messages": [{"content": "hello there", "role": "user"}]})
    assert np.array_equal(one, two)


def test_other_tools_are_another_prompt():
    body = {"messages": [{"role": "user", "content": "hello there"}]}
    one, two = (prompt_tokens({**body, "tools": [{"name": name}]}) for name in "ab")
    assert one[0] == two[0]
    assert not np.array_equal(one[:4], two[:4])


def test_responses_and_messages_are_prompts_too():
    text = "what is the capital of France?"
    assert prompt_tokens({"input": text + " Now."})[:7].tolist() == (
        prompt_tokens({"input": text})[:7].tolist()
    )
    one, two = (
        prompt_tokens({"system": system, "messages": [{"role": "user", "content": text}]})
        for system in ("be brief", "be long!")
    )
    assert one[0] == two[0] and not np.array_equal(one, two)


def test_token_ids_are_taken_as_they_are():
    assert prompt_tokens({"prompt": [5, 6]}).tolist() == [5, 6]


@pytest.mark.parametrize(
    "body",
    [{}, {"prompt": ["a", "b"]}, {"prompt": [1, True]}, {"prompt": [1 << 70]}, {"prompt": 1},
     {"messages": [{"content": "\ud800"}]}, {"messages": [{"content": object()}]}],
)  # fmt: skip
def test_unreadable_body_is_no_prompt(body):
    assert prompt_tokens(body) is None

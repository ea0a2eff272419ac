"""Tokenizing in lanes: fair, bounded, and by a real process that can be ended."""

import asyncio
import os
import subprocess
import sys
import threading
import unicodedata

import numpy as np
import pytest
from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

import router.api.render
from router.api.errors import ApiError
from router.api.render import (
    SHORT_BYTES,
    FairQueue,
    PromptRefused,
    TokenizerProcess,
    Tokenizing,
    TokenizingLane,
    longest_s,
)
from router.api.tenants import Tenant
from router.api.tokenizer import PromptTooLong, longest_token_bytes
from tests.router.stream_worker import until

# -- the order of a fair queue -----------------------------------------------------------------


def drained(queue):
    items = []
    while (item := queue.take()) is not None:
        items.append(item)
    return items


def filled(*entries):
    queue = FairQueue()
    for item, weight, cost in entries:
        queue.put(item, item[0], weight, cost)
    return queue


def test_one_tenant_is_served_in_the_order_of_arrival():
    assert drained(filled(("a1", 1, 9), ("a2", 1, 1), ("a3", 1, 5))) == ["a1", "a2", "a3"]


def test_small_requests_pass_another_tenants_large_ones():
    queue = filled(("a1", 1, 100), ("a2", 1, 100), ("b1", 1, 30), ("b2", 1, 30))
    # Virtual times: both 0, a came first: a1 (a at 100); b1 (b 30), b2 (b 60); then a2.
    assert drained(queue) == ["a1", "b1", "b2", "a2"]


def test_a_weight_of_two_gets_twice_the_work():
    ones = [(f"a{i}", 1, 10) for i in range(3)]
    twos = [(f"b{i}", 2, 10) for i in range(5)]
    # a advances by 10, b by 5: a 0 10 20, b 0 5 10 15 20; ties go to who arrived first.
    assert drained(filled(*ones, *twos)) == ["a0", "b0", "b1", "a1", "b2", "b3", "a2", "b4"]


def test_a_tenant_that_had_nothing_waiting_does_not_catch_up_on_the_past():
    queue = filled(("a1", 1, 10), ("a2", 1, 10), ("a3", 1, 10), ("a4", 1, 10))
    assert [queue.take() for _ in range(3)] == ["a1", "a2", "a3"]
    # a3 began at 20, so b begins there, and a stands at 30: b at 20 and 30, where a4 is earlier.
    for item in ("b1", "b2", "b3"):
        queue.put(item, "b", 1, 10)
    assert drained(queue) == ["b1", "a4", "b2", "b3"]


def test_a_tenant_that_comes_back_at_once_has_not_forgotten_its_last_work():
    queue = filled(("a1", 1, 100), ("b1", 1, 10))
    assert queue.take() == "a1"
    queue.put("a2", "a", 1, 100)
    queue.put("b2", "b", 1, 10)
    assert drained(queue) == ["b1", "b2", "a2"]


def test_all_are_even_again_once_nothing_waits():
    queue = filled(("a1", 1, 100))
    assert drained(queue) == ["a1"]
    queue.put("a2", "a", 1, 1)
    queue.put("b1", "b", 1, 1)
    assert drained(queue) == ["a2", "b1"]


def test_what_is_dropped_is_not_charged():
    queue = filled(("a1", 1, 100), ("a2", 1, 1), ("b1", 1, 1))
    for item, tenant in (("a1", "a"), ("a1", "a"), ("c1", "c")):
        queue.drop(item, tenant)
    assert drained(queue) == ["a2", "b1"]
    queue.put("a3", "a", 1, 1)
    queue.drop("a3", "a")
    assert queue.take() is None


ALICE, BOB = Tenant("alice"), Tenant("bob")


# -- lanes ------------------------------------------------------------------------------------


class Gate:
    """Work that begins, is noted, and ends when it is let."""

    def __init__(self):
        self.begun, self.may_end = [], threading.Semaphore(0)

    def __call__(self, name):
        def work():
            self.begun.append(name)
            assert self.may_end.acquire(timeout=30)
            if name.startswith("bad"):
                raise ValueError(name)
            return name

        return work


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    for _ in range(99):
        gate.may_end.release()


@pytest.fixture
def lane():
    lane = TokenizingLane("test")
    yield lane
    lane.close()


async def begin(lane, gate, name, tenant, cost):
    task = asyncio.create_task(lane.run(tenant, cost, gate(name)))
    await asyncio.sleep(0)
    return task


async def test_another_tenants_small_work_passes_what_waits(lane, gate):
    tasks = [await begin(lane, gate, f"a{i}", ALICE, 1000) for i in range(3)]
    tasks.append(await begin(lane, gate, "b", BOB, 1))
    for _ in tasks:
        gate.may_end.release()
    assert await asyncio.gather(*tasks) == ["a0", "a1", "a2", "b"]
    assert gate.begun == ["a0", "b", "a1", "a2"]


async def test_work_that_fails_lets_the_next_one_begin(lane, gate):
    tasks = [await begin(lane, gate, name, ALICE, 1) for name in ("bad", "good")]
    gate.may_end.release()
    gate.may_end.release()
    with pytest.raises(ValueError, match="bad"):
        await tasks[0]
    assert await tasks[1] == "good"


async def test_who_leaves_while_it_waits_is_taken_out_of_the_queue(lane, gate):
    first, left, last = [await begin(lane, gate, n, ALICE, 1) for n in ("1", "2", "3")]
    left.cancel()
    for _ in range(2):
        gate.may_end.release()
    assert (await first, await last) == ("1", "3")
    assert left.cancelled() and gate.begun == ["1", "3"]


async def test_who_leaves_at_its_turn_passes_it_on(lane, gate):
    first, left, last = [await begin(lane, gate, n, ALICE, 1) for n in ("1", "2", "3")]
    first.add_done_callback(lambda _: left.cancel())
    gate.may_end.release()
    assert await first == "1"
    gate.may_end.release()
    gate.may_end.release()
    assert await last == "3"


async def test_what_was_begun_for_one_who_left_ends_before_the_next(lane, gate):
    left, last = [await begin(lane, gate, name, ALICE, 1) for name in ("bad", "good")]
    await until(lambda: gate.begun)
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    await asyncio.sleep(0.05)
    assert gate.begun == ["bad"]
    gate.may_end.release()
    gate.may_end.release()
    assert await last == "good"


# -- which lane, and what is too long -------------------------------------------------------------


class Recorded:
    """Stands for the process: notes what it is asked."""

    def __init__(self):
        self.asked = []

    def tokens(self, plain, most_tokens):
        self.asked.append((plain, most_tokens))
        return np.arange(3)

    def close(self):
        self.asked.append("closed")


@pytest.fixture
def tokenizing(renderer):
    process = Recorded()
    tokenizing = Tokenizing(renderer, process)
    yield tokenizing, process
    tokenizing.close()
    assert process.asked[-1] == "closed"


def prompt(text):
    return CompletionRequest(model="m", prompt=text)


async def test_only_long_texts_go_to_the_process(tokenizing, renderer):
    tokenizing, process = tokenizing
    short = await tokenizing.tokens(prompt("hello"), SHORT_BYTES, ALICE, None)
    expected = renderer.render(prompt("hello")).token_ids
    assert short.token_ids.tolist() == expected.tolist()
    ids = await tokenizing.tokens(prompt([5, 6]), SHORT_BYTES + 1, ALICE, None)
    assert ids.token_ids.tolist() == [5, 6] and process.asked == []
    await tokenizing.tokens(prompt("hello"), SHORT_BYTES + 1, ALICE, 9)
    assert process.asked == [({"text": "hello", "add_special_tokens": True}, 9)]


async def test_a_prompt_of_too_many_bytes_is_refused_untokenized(tokenizing, renderer):
    tokenizing, _ = tokenizing
    longest = renderer.tokenizer.longest_token_bytes
    fits = await tokenizing.tokens(prompt("a" * 2 * longest), 1, ALICE, 2)
    assert fits.tokens > 2, "the bytes alone do not say so"
    with pytest.raises(ApiError) as error:
        await tokenizing.tokens(prompt("a" * (2 * longest + 1)), 1, ALICE, 2)
    assert (error.value.status, error.value.code) == (400, "context_length_exceeded")
    assert f"{2 * longest + 1} bytes are at least 3" in error.value.message


def byte_level(normalizer=None, parts=(), special=None, longest="abcdefg"):
    vocabulary = {letter: i for i, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    vocabulary[longest] = 256
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.Sequence([*parts, pre_tokenizers.ByteLevel()])
    if normalizer is not None:
        backend.normalizer = normalizer
    if special is not None:
        backend.add_special_tokens([special])
    return backend


def test_the_longest_token_bounds_the_bytes_of_each():
    assert longest_token_bytes(byte_level()) == 7
    # Eight characters, of two bytes each as text; in a byte-level token each is one byte.
    assert longest_token_bytes(byte_level(longest="é" * 8)) == 8
    assert longest_token_bytes(byte_level(special="é" * 8)) == 16
    assert longest_token_bytes(byte_level(normalizers.NFC())) == 28


@pytest.mark.parametrize(
    "backend",
    [
        None,
        byte_level(normalizers.Strip()),
        byte_level(normalizers.NFKC()),
        byte_level(parts=[pre_tokenizers.Split(" ", "removed")]),
        byte_level(parts=[pre_tokenizers.WhitespaceSplit()]),
        byte_level(special=AddedToken("<x>", lstrip=True)),
        byte_level(special=AddedToken("<x>", rstrip=True)),
        Tokenizer(models.BPE({"a": 0}, [])),
    ],
)
def test_no_bound_is_claimed_where_text_may_disappear(backend):
    assert longest_token_bytes(backend) is None


def test_a_missing_byte_or_a_truncation_leaves_no_bound():
    backend = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel()
    assert longest_token_bytes(backend) is None
    backend = byte_level()
    backend.enable_truncation(10)
    assert longest_token_bytes(backend) is None


def test_nfc_shrinks_no_character_to_less_than_a_quarter():
    characters = [chr(i) for i in range(sys.maxunicode + 1) if not 0xD800 <= i < 0xE000]
    apart = {one: unicodedata.normalize("NFD", one) for one in characters}
    longest = {}
    for one, parts in apart.items():
        longest[parts] = max(longest.get(parts, 0), len(one.encode()))

    def most_bytes(parts):
        """Of all texts that decompose into `parts`."""
        most = [0] + [-1] * len(parts)
        for start in range(len(parts)):
            for end in range(start + 1, len(parts) + 1):
                if most[start] >= 0 and parts[start:end] in longest:
                    most[end] = max(most[end], most[start] + longest[parts[start:end]])
        return most[-1]

    ratios = {
        one: most_bytes(parts) / len(one.encode())
        for one, parts in apart.items()
        if unicodedata.is_normalized("NFC", one)
    }
    assert max(ratios.values()) == ratios["\u0390"] == 3.5


# -- the process ----------------------------------------------------------------------------------


@pytest.fixture
def scripted():
    process = TokenizerProcess("", "tests.router.scripted_tokenizer")
    yield process
    process.close()


def text(what):
    return {"text": what, "add_special_tokens": False}


def gone(pid):
    return not os.path.exists(f"/proc/{pid}")


def test_the_process_gives_the_same_tokens_and_imports_no_torch(renderer):
    process = TokenizerProcess(renderer.source)
    try:
        content = "hé😀 hello world " * 2000
        messages = [{"role": "user", "content": content}]
        chat = ChatCompletionRequest(model="m", messages=messages)
        (plain,) = renderer.plain(chat)
        assert process.tokens(plain).tolist() == renderer.render(chat).token_ids.tolist()
        # 2,000 times 20 bytes, and 31 of <s>, <|user|>, <|end|> and <|assistant|>
        with pytest.raises(PromptTooLong, match="40031"):
            process.tokens(plain, 1)
        with open(f"/proc/{process.pid}/maps") as maps:
            assert "torch" not in maps.read()
    finally:
        process.close()


def test_a_prompt_that_hangs_costs_the_process_and_the_next_one_starts_another(
    scripted, monkeypatch
):
    scripted.tokens(text("start"))
    pid = scripted.pid
    monkeypatch.setattr(router.api.render, "longest_s", lambda _bytes: 0.05)
    with pytest.raises(ApiError) as error:
        scripted.tokens(text("hang"))
    assert (error.value.status, error.value.code) == (400, "prompt_not_tokenized")
    assert gone(pid)
    monkeypatch.undo()
    assert scripted.tokens(text("ab")).tolist() == [97, 98]


@pytest.mark.parametrize("what", ["die", "memory"])
def test_a_prompt_that_ends_the_process_or_takes_its_memory_is_refused(scripted, what):
    with pytest.raises(ApiError) as error:
        scripted.tokens(text(what))
    assert (error.value.status, error.value.code) == (400, "prompt_not_tokenized")
    assert scripted.tokens(text("ab")).tolist() == [97, 98]


def test_what_a_template_refuses_is_told_without_its_text(scripted):
    with pytest.raises(PromptRefused, match=r"^ValueError$"):
        scripted.tokens(text("refuse"))


def test_a_process_that_does_not_start_is_an_error_of_ours():
    process = TokenizerProcess("", "tests.router.no_such_module")
    with pytest.raises(ApiError) as error:
        process.tokens(text("ab"))
    assert (error.value.status, error.value.code) == (503, "tokenizer_not_started")
    process.close()


def test_a_closed_process_is_gone_and_starts_no_more(scripted):
    scripted.tokens(text("ab"))
    pid = scripted.pid
    scripted.close()
    assert gone(pid)
    with pytest.raises(ApiError, match="did not start"):
        scripted.tokens(text("ab"))


def test_the_process_dies_with_its_parent():
    program = (
        "import os; from router.api.render import TokenizerProcess as P;"
        "p = P('', 'tests.router.scripted_tokenizer');"
        "p.tokens({'text': 'a'}); print(p.pid, flush=True); os._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    pid = int(done.stdout.split()[-1])
    waiter = threading.Event()
    while not gone(pid):
        assert not waiter.wait(0.01)


def test_the_time_allowed_grows_with_the_bytes():
    # 5 s and 20 s for each MB
    assert longest_s(0) == 5.0 and longest_s(2_000_000) == pytest.approx(45.0)

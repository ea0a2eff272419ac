"""Tokenizing in lanes: fair, bounded, and by a real process that can be ended."""

import asyncio
import os
import subprocess
import sys
import threading
import unicodedata

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

import kappa_router.api.tokenizer_process
from kappa_router.api.errors import ApiError
from kappa_router.api.fair_queue import FairQueue
from kappa_router.api.render import SHORT_BYTES, Tokenizing, TokenizingLane
from kappa_router.api.request_body import RequestBody
from kappa_router.api.tenants import Tenant
from kappa_router.api.tokenizer import PromptTooLong, longest_token_bytes
from kappa_router.api.tokenizer_process import PromptRefused, TokenizerProcess, longest_s
from tests.router.building import refused
from tests.router.patience import until

ALICE, BOB = Tenant("alice"), Tenant("bob")

# -- the order of a fair queue ---------------------------------------------------------------------


def drained(queue):
    items = []
    while (item := queue.take()) is not None:
        items.append(item)
    return items


def put(queue, *entries):
    for item, weight, cost in entries:
        queue.put(item, item[0], weight, cost)
    return queue


@pytest.mark.parametrize(
    ("entries", "order"),
    [
        # One tenant is served in the order of arrival.
        ([("a1", 1, 9), ("a2", 1, 1), ("a3", 1, 5)], "a1 a2 a3"),
        # Virtual times: both 0, a came first: a1 (a at 100); b1 (b 30), b2 (b 60); then a2.
        ([("a1", 1, 100), ("a2", 1, 100), ("b1", 1, 30), ("b2", 1, 30)], "a1 b1 b2 a2"),
        # A weight of two gets twice the work: a advances by 10, b by 5: a 0 10 20, b 0 5 10 15 20;
        # ties go to who arrived first.
        ([(f"a{i}", 1, 10) for i in range(3)] + [(f"b{i}", 2, 10) for i in range(5)],
         "a0 b0 b1 a1 b2 b3 a2 b4"),
    ],
)  # fmt: skip
def test_tenants_are_served_by_weight(entries, order):
    assert drained(put(FairQueue(), *entries)) == order.split()


def test_idle_tenant_does_not_catch_up_on_the_past():
    queue = put(FairQueue(), *((f"a{i}", 1, 10) for i in range(1, 5)))
    assert [queue.take() for _ in range(3)] == ["a1", "a2", "a3"]
    # a3 began at 20, so b begins there, and a stands at 30: b at 20 and 30, where a4 is earlier.
    put(queue, ("b1", 1, 10), ("b2", 1, 10), ("b3", 1, 10))
    assert drained(queue) == ["b1", "a4", "b2", "b3"]


def test_returning_tenant_keeps_its_last_cost():
    queue = put(FairQueue(), ("a1", 1, 100), ("b1", 1, 10))
    assert queue.take() == "a1"
    put(queue, ("a2", 1, 100), ("b2", 1, 10))
    assert drained(queue) == ["b1", "b2", "a2"]
    # Once nothing waits, all are even again.
    assert drained(put(queue, ("a3", 1, 1), ("b3", 1, 1))) == ["a3", "b3"]


def test_dropped_entries_are_not_charged():
    queue = put(FairQueue(), ("a1", 1, 100), ("a2", 1, 1), ("b1", 1, 1))
    for item, tenant in (("a1", "a"), ("a1", "a"), ("c1", "c")):
        queue.drop(item, tenant)
    assert drained(queue) == ["a2", "b1"]
    put(queue, ("a3", 1, 1))
    queue.drop("a3", "a")
    assert queue.take() is None


# -- lanes -----------------------------------------------------------------------------------------


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
def begin():
    """`await begin(name, ...)`: tasks of one lane; `begin.gate` lets their work end."""
    lane, gate = TokenizingLane("test"), Gate()

    async def make(*names):
        tasks = []
        for name in names:
            tasks.append(asyncio.create_task(lane.run(ALICE, 1, gate(name))))
            await asyncio.sleep(0)
        return tasks

    make.gate = gate
    yield make
    gate.may_end.release(99)
    lane.close()


async def test_work_that_fails_lets_the_next_one_begin(begin):
    bad, good = await begin("bad", "good")
    begin.gate.may_end.release(2)
    with pytest.raises(ValueError, match="bad"):
        await bad
    assert await good == "good"


async def test_work_begun_for_a_client_that_left_ends_first(begin):
    left, last = await begin("bad", "good")
    await until(lambda: begin.gate.begun)
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    await asyncio.sleep(0.05)
    assert begin.gate.begun == ["bad"]
    begin.gate.may_end.release(2)
    assert await last == "good"


# -- which lane, and prompts too long --------------------------------------------------------------


class Recorded:
    """Stands for the process: notes what it is asked."""

    def __init__(self, tokenizer):
        self.asked, self._tokenizer = [], tokenizer

    def tokens(self, plain, most_tokens, _source, tenant):
        self.asked.append((plain, most_tokens, tenant))
        return np.arange(3)

    def encode(self, texts, source):
        self.asked.append(texts)
        return self._tokenizer.encode(texts)

    def close(self):
        self.asked.append("closed")


@pytest.fixture
def tokenizing(renderer):
    process = Recorded(renderer.tokenizer)
    tokenizing = Tokenizing({"m": renderer}, [process])
    yield tokenizing, process
    tokenizing.close()
    assert process.asked[-1] == "closed"


def prompt(text):
    return RequestBody.completion({"model": "m", "prompt": text})


async def test_tokens_are_made_here_while_little_is_new(tokenizing, renderer):
    tokenizing, process = tokenizing
    short = await tokenizing.tokens("m", prompt("hello"), SHORT_BYTES, ALICE, None)
    expected = renderer.render(prompt("hello")).token_ids
    assert short.token_ids.tolist() == expected.tolist()
    ids = await tokenizing.tokens("m", prompt([5, 6]), SHORT_BYTES + 1, ALICE, None)
    assert ids.token_ids.tolist() == [5, 6] and process.asked == []


@pytest.mark.parametrize(("body_bytes", "here"), [(2048, True), (2049, False)])
async def test_tiny_bodies_wake_no_thread(tokenizing, renderer, monkeypatch, body_bytes, here):
    threads, encode = [], renderer.tokenizer.encode

    def encoded(texts):
        threads.append(threading.get_ident())
        return encode(texts)

    monkeypatch.setattr(renderer.tokenizer, "encode", encoded)
    body = prompt(f"one of {body_bytes} bytes")
    await tokenizing[0].tokens("m", body, body_bytes, ALICE, None)
    assert (threads == [threading.get_ident()]) is here and len(threads) == 1


async def test_tiny_body_of_which_much_is_made_is_encoded_elsewhere(tokenizing):
    tokenizing, process = tokenizing
    await tokenizing.tokens("m", prompt("a fox " * SHORT_BYTES), 9, ALICE, None)
    assert len(process.asked) == 1


def talk(*texts):
    roles = ["user", "assistant"] * len(texts)
    messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
    return RequestBody.chat({"model": "m", "messages": messages})


async def test_tokens_of_long_new_text_are_made_by_a_process(tokenizing, renderer):
    tokenizing, process = tokenizing
    long = "a quick brown fox jumps " * SHORT_BYTES
    size = len(long)
    first = await tokenizing.tokens("m", talk(long), size, ALICE, None)
    assert first.token_ids.tolist() == renderer.render(talk(long)).token_ids.tolist()
    assert [sum(map(len, texts)) >= size for texts in process.asked] == [True]
    # The next turn brings little that is new; to another tenant all is.
    turn = talk(long, "over the dog", "why?")
    found = await tokenizing.tokens("m", turn, size, ALICE, None)
    assert found.token_ids.tolist() == renderer.render(turn).token_ids.tolist()
    assert len(process.asked) == 1
    await tokenizing.tokens("m", turn, size, BOB, None)
    assert len(process.asked) == 2


async def test_tokens_of_very_long_bodies_are_made_whole_by_a_process(tokenizing):
    tokenizing, process = tokenizing
    await tokenizing.tokens("m", prompt("hello"), (1 << 20) + 1, ALICE, 9)
    assert process.asked == [({"text": "hello", "add_special_tokens": True}, 9, "alice")]


async def test_lane_runs_as_many_at_once_as_it_is_wide():
    lane, gate = TokenizingLane("test", 2), Gate()
    tasks = [asyncio.create_task(lane.run(ALICE, 1, gate(name))) for name in ("a", "b", "c")]
    await until(lambda: len(gate.begun) == 2)
    assert sorted(gate.begun) == ["a", "b"]
    gate.may_end.release(3)
    assert await asyncio.gather(*tasks) == ["a", "b", "c"]
    lane.close()


async def test_prompt_of_too_many_bytes_is_refused_untokenized(tokenizing, renderer):
    tokenizing, _ = tokenizing
    longest = renderer.tokenizer.longest_token_bytes
    fits = await tokenizing.tokens("m", prompt("a" * 2 * longest), 1, ALICE, 2)
    assert fits.tokens > 2, "the bytes alone do not say so"
    with pytest.raises(ApiError) as error:
        await tokenizing.tokens("m", prompt("a" * (2 * longest + 1)), 1, ALICE, 2)
    assert (error.value.status, error.value.code) == (400, "context_length_exceeded")
    assert f"{2 * longest + 1} bytes are at least 3" in error.value.message


def byte_level(normalizer=None, parts=(), special=None, longest="abcdefg", truncated=False):
    vocabulary = {letter: i for i, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    vocabulary[longest] = 256
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.Sequence([*parts, pre_tokenizers.ByteLevel()])
    if normalizer is not None:
        backend.normalizer = normalizer
    if special is not None:
        backend.add_special_tokens([special])
    if truncated:
        backend.enable_truncation(10)
    return backend


def few_bytes(pre_tokenizer=None):
    backend = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    return backend


def test_longest_token_bounds_the_bytes_of_each():
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
        byte_level(truncated=True),
        few_bytes(),
        few_bytes(pre_tokenizers.ByteLevel()),
    ],
)
def test_longest_token_is_unbounded_where_text_may_vanish(backend):
    assert longest_token_bytes(backend) is None


def test_nfc_shrinks_no_character_to_less_than_a_quarter():
    characters = [chr(i) for i in range(sys.maxunicode + 1) if not 0xD800 <= i < 0xE000]
    apart = {one: unicodedata.normalize("NFD", one) for one in characters}
    # All others are no character's part, and stay as they are.
    apart = {one: parts for one, parts in apart.items() if one != parts}
    apart |= {one: one for parts in list(apart.values()) for one in parts}
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


# -- the process -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scripted():
    process = TokenizerProcess("", module="tests.router.scripted_tokenizer")
    yield process
    process.close()


def text(what):
    return {"text": what, "add_special_tokens": False}


def gone(pid):
    return not os.path.exists(f"/proc/{pid}")


def test_process_gives_the_same_tokens_and_imports_no_torch(renderer):
    process = TokenizerProcess(renderer.source)
    try:
        content = "hé😀 hello world " * 2000
        messages = [{"role": "user", "content": content}]
        chat = RequestBody.chat({"model": "m", "messages": messages})
        (plain,) = renderer.plain(chat)
        assert process.tokens(plain).tolist() == renderer.render(chat).token_ids.tolist()
        texts = ["hé😀 hello", "", "world " * 99]
        expected = [one.tolist() for one in renderer.tokenizer.encode(texts)]
        assert [one.tolist() for one in process.encode(texts)] == expected
        # 2,000 times 20 bytes, and 31 of <s>, <|user|>, <|end|> and <|assistant|>
        with pytest.raises(PromptTooLong, match="40031"):
            process.tokens(plain, 1)
        with open(f"/proc/{process._process.pid}/maps") as maps:
            assert "libtorch" not in maps.read()
    finally:
        process.close()


@pytest.mark.parametrize("what", ["hang", "die", "memory"])
def test_prompt_that_breaks_the_process_is_refused_alone(scripted, monkeypatch, what):
    assert scripted.tokens(text("ab")).tolist() == [97, 98]
    pid = scripted._process.pid
    if what == "hang":
        monkeypatch.setattr(kappa_router.api.tokenizer_process, "longest_s", lambda _bytes: 0.05)
    error = refused(scripted.tokens, text(what))
    assert (error.status, error.code) == (400, "prompt_not_tokenized")
    assert gone(pid) or what == "memory"
    monkeypatch.undo()
    assert scripted.tokens(text("ab")).tolist() == [97, 98]


def test_template_refusal_is_named_without_its_text(scripted):
    with pytest.raises(PromptRefused, match=r"^ValueError$"):
        scripted.tokens(text("refuse"))


def test_process_that_does_not_start_is_an_error_of_ours():
    process = TokenizerProcess("", module="tests.router.no_such_module")
    error = refused(process.tokens, text("ab"))
    assert (error.status, error.code) == (503, "tokenizer_not_started")
    process.close()


def test_closed_process_is_gone_and_starts_no_more():
    process = TokenizerProcess("", module="tests.router.scripted_tokenizer")
    process.tokens(text("ab"))
    pid = process._process.pid
    process.close()
    assert gone(pid)
    assert "did not start" in str(refused(process.tokens, text("ab")))


def test_process_dies_with_its_parent():
    program = (
        "import os; from kappa_router.api.tokenizer_process import TokenizerProcess as P;"
        "p = P('', module='tests.router.scripted_tokenizer');"
        "p.tokens({'text': 'a'}); print(p._process.pid, flush=True); os._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    pid = int(done.stdout.split()[-1])
    waiter = threading.Event()
    while not gone(pid):
        assert not waiter.wait(0.01)


def test_time_allowed_grows_with_the_bytes():
    # 5 s and 20 s for each MB
    assert longest_s(0) == 5.0 and longest_s(2_000_000) == pytest.approx(45.0)

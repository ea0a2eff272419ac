"""Tokens are counted as vLLM generates them, however it merges what is not taken in time."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import async_llm, output_processor
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from kappa.protocol import REQUEST_ID_KEY, TENANT_KEY, TO_BODY_HEADER, TO_SECRET_HEADER
from workers import generated
from workers.http_gate import WorkerGate
from workers.in_flight import InFlight
from workers.tiny_model import make_tiny_model
from workers.vllm import output_collector
from workers.vllm.arguments import CPU_ENV

pytestmark = pytest.mark.vllm

TOKENS = 24
PATIENCE_S = 60.0


def output(*tokens, finished=False):
    answer = CompletionOutput(
        0, "x" * len(tokens), list(tokens), None, None, "length" if finished else None
    )
    return RequestOutput("r", None, [1], None, [answer], finished)


def collector(kind=RequestOutputKind.DELTA):
    tally = generated.begin()
    return output_collector.CountingCollector(kind, "r"), tally


def tokens_of(taken):
    return [token for answer in taken.outputs for token in answer.token_ids]


async def test_tokens_are_counted_once_when_they_are_taken():
    made, tally = collector()
    assert made.get_nowait() is None
    made.put(output(1))
    assert tokens_of(await made.get()) == [1]
    for token in (2, 3):
        made.put(output(token))
    assert tally.tokens == 1
    made.put(output(4, finished=True))
    assert tokens_of(made.get_nowait()) == [2, 3, 4]
    assert tally.tokens == 4


async def test_a_failure_is_raised_and_has_no_tokens():
    made, tally = collector()
    made.put(EngineDeadError())
    with pytest.raises(EngineDeadError):
        await made.get()
    assert tally.tokens == 0


async def test_an_answer_that_is_not_streamed_is_counted_whole():
    made, tally = collector(RequestOutputKind.FINAL_ONLY)
    made.put(output(1, 2, finished=True))
    assert tokens_of(await made.get()) == [1, 2] and tally.tokens == 2


@asynccontextmanager
async def served(folder):
    """A vLLM engine of a tiny model, and its HTTP application."""
    model = make_tiny_model(folder / "model", ["one two three"] * 9)
    args = make_arg_parser(FlexibleArgumentParser()).parse_args([
        f"--model={model}", "--served-model-name=m", "--dtype=float32", "--max-model-len=256",
        "--num-gpu-blocks-override=64", "--block-size=32", "--max-num-seqs=4", "--enforce-eager",
        "--disable-log-stats",
    ])  # fmt: skip
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(args))
    try:
        app = build_app(args, supported_tasks=("generate",), model_config=llm.model_config)
        await init_app_state(llm, app.state, args, ("generate",))
        yield llm, app
    finally:
        llm.shutdown()


async def until_generated(llm):
    async with asyncio.timeout(PATIENCE_S):
        while llm.get_num_unfinished_requests():
            await asyncio.sleep(0.01)


async def ask(llm, gate, path, **fields):
    """A stream's events, read so late that all but the first tokens wait to be taken."""
    body = {"model": "m", "stream": True, "max_tokens": TOKENS, "ignore_eos": True, **fields}
    sets = {"vllm_xargs": {REQUEST_ID_KEY: "r", TENANT_KEY: "t"}}
    headers = [
        (b"content-type", b"application/json"), (TO_SECRET_HEADER.encode(), b"s"),
        (TO_BODY_HEADER.encode(), json.dumps(sets).encode()),
    ]  # fmt: skip
    parts, text = [json.dumps(body).encode()], []

    async def receive():
        if parts:
            return {"type": "http.request", "body": parts.pop(), "more_body": False}
        await asyncio.Event().wait()

    async def send(message):
        text.append(message.get("body", b"").decode())
        if '"text"' in text[-1] or '"content"' in text[-1]:
            await until_generated(llm)

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "method": "POST", "path": path,
        "headers": headers, "http_version": "1.1", "scheme": "http", "raw_path": path.encode(),
        "query_string": b"", "root_path": "", "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }  # fmt: skip
    await gate(scope, receive, send)
    return [line for line in "".join(text).splitlines() if line.startswith('data: {"id"')]


async def test_tokens_of_merged_outputs_are_counted(tmp_path, monkeypatch):
    for name, value in CPU_ENV.items():
        monkeypatch.setenv(name, value)
    stock = output_processor.RequestOutputCollector
    monkeypatch.setattr(async_llm, "RequestOutputCollector", stock)
    output_collector.install()

    async def healthy():
        pass

    async with served(tmp_path) as (llm, app):
        gate = WorkerGate(app, "s", InFlight(0.0), healthy)
        chat = {"messages": [{"role": "user", "content": "one two"}]}
        for path, fields, tokens in (
            ("/v1/chat/completions", chat, TOKENS),
            ("/v1/chat/completions", {**chat, "n": 2}, 2 * TOKENS),
            ("/v1/completions", {"prompt": ["one", "two three"]}, 2 * TOKENS),
            ("/v1/completions", {"prompt": "one", "stream": False}, TOKENS),
        ):
            events = await ask(llm, gate, path, **fields)
            assert len(events) < tokens  # outputs were merged
            assert gate._in_flight.news().generated == {"r": tokens}

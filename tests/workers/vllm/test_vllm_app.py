"""vLLM's own application with what we put into it: one engine, asked through the worker's gate."""

from __future__ import annotations

import asyncio
import json

import pytest
import pytest_asyncio
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import async_llm, detokenizer, output_processor
from vllm.v1.engine.async_llm import AsyncLLM

from kappa.protocol import REQUEST_ID_KEY, TENANT_KEY, TO_BODY_HEADER, TO_SECRET_HEADER
from kappa_workers.http_gate import WorkerGate
from kappa_workers.in_flight import InFlight
from kappa_workers.tiny_model import make_tiny_model
from kappa_workers.vllm import incremental_prompts, output_collector
from kappa_workers.vllm.arguments import CPU_ENV

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

TOKENS = 24
PATIENCE_S = 60.0
TALK = {"messages": [{"role": "user", "content": "one two"}]}


class Served:
    """The engine of a tiny model behind a gate."""

    def __init__(self, llm, app):
        self.llm, self.in_flight = llm, InFlight(0.0)
        self._gate = WorkerGate(app, "s", self.in_flight, self._healthy)

    async def _healthy(self):
        pass

    async def _until_generated(self):
        async with asyncio.timeout(PATIENCE_S):
            while self.llm.get_num_unfinished_requests():
                await asyncio.sleep(0.01)

    async def ask(self, path, **fields):
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
                await self._until_generated()

        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "method": "POST", "path": path,
            "headers": headers, "http_version": "1.1", "scheme": "http", "raw_path": path.encode(),
            "query_string": b"", "root_path": "", "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }  # fmt: skip
        await self._gate(scope, receive, send)
        return [line for line in "".join(text).splitlines() if line.startswith('data: {"id"')]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory):
    model = make_tiny_model(tmp_path_factory.mktemp("served") / "model", ["one two three"] * 9)
    args = make_arg_parser(FlexibleArgumentParser()).parse_args([
        f"--model={model}", "--served-model-name=m", "--dtype=float32", "--max-model-len=256",
        "--num-gpu-blocks-override=64", "--block-size=32", "--max-num-seqs=4", "--enforce-eager",
        "--disable-log-stats",
    ])  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CPU_ENV.items():
            patch.setenv(name, value)
        for module, name, stock in (
            (async_llm, "RequestOutputCollector", output_processor.RequestOutputCollector),
            (detokenizer, "FastIncrementalDetokenizer", detokenizer.FastIncrementalDetokenizer),
        ):
            patch.setattr(module, name, stock)  # to be set back
        output_collector.install()
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(args))
        try:
            app = build_app(args, supported_tasks=("generate",), model_config=llm.model_config)
            await init_app_state(llm, app.state, args, ("generate",))
            yield Served(llm, app)
        finally:
            llm.shutdown()


async def test_tokens_of_merged_outputs_are_counted(served):
    for path, fields, tokens in (
        ("/v1/chat/completions", TALK, TOKENS),
        ("/v1/chat/completions", {**TALK, "n": 2}, 2 * TOKENS),
        ("/v1/completions", {"prompt": ["one", "two three"]}, 2 * TOKENS),
        ("/v1/completions", {"prompt": "one", "stream": False}, TOKENS),
    ):
        events = await served.ask(path, **fields)
        assert len(events) < tokens  # outputs were merged
        assert served.in_flight.news().generated == {"r": tokens}


async def test_every_api_tokenizes_incrementally(served, monkeypatch):
    said = []
    assert incremental_prompts.install(served.llm.renderer)
    tokenizer = served.llm.renderer._tokenize_prompt_async._tokenizer
    look_up = tokenizer.look_up
    monkeypatch.setattr(
        tokenizer, "look_up", lambda *given: said.append(given[1]) or look_up(*given)
    )
    for path, fields in (
        ("/v1/chat/completions", TALK), ("/v1/completions", {"prompt": "one"}),
        ("/v1/messages", TALK), ("/v1/responses", {"input": "one two", "store": False}),
    ):  # fmt: skip
        said.clear()
        await served.ask(path, **fields)
        assert said == ["t"], path

"""Sends one request of a load test to any OpenAI endpoint and times its stream.

Chats go to `/v1/chat/completions`; texts and token ids to `/v1/completions`. Nothing that the
endpoint does raises here: a failure becomes the record's kind of error. Little is done per chunk,
as thousands of streams share one core; bodies are encoded before they are due. The headers of our
own cluster are read where they are there.

A chunk of a stream may hold several server-sent events or a part of one. An event counts as output
if it carries text, or if it is a choice that neither announces the role nor ends the answer:
engines send tokens without text, too (special tokens, halves of a character).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Annotated, Any

import aiohttp
import msgspec
import numpy as np

from kappa.checks import http_parts
from kappa.keys import bearer
from kappa_loadtest.run_folder import RequestRecord
from kappa_workload.replay import Prompt

PROBE_S = 10.0
"""Timeout of requests about the endpoint itself."""
NETWORK_ERRORS = (aiohttp.ClientError, TimeoutError, OSError)
_ERROR_BYTES = 4096
_LONGEST_EVENT_BYTES = 4 << 20
_CONNECT_S = 30.0
# Below uvicorn's 5 s: a connection that the server is about to close is never used again.
_KEEPALIVE_S = 2.0
_NO_STREAMS = ("application/json", "text/html")


class EndpointError(ValueError):
    """The endpoint cannot be used; the message gives place, reason and remedy."""


class StreamFault(Exception):
    """The stream breaks the protocol; `kind` is one of `run_folder.ERROR_KINDS`."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind, self.detail = kind, detail


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request ready to be sent."""

    path: str
    body: bytes


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    """The endpoint, and the options of every request to it."""

    url: str  # base, with or without `/v1`
    model: str  # as the endpoint names it
    # By tenant, with "" for all others; without a priority the field is not sent.
    keys: Mapping[str, str] = field(default_factory=dict)
    priorities: Mapping[str, int] = field(default_factory=dict)
    timeout_s: float = 300.0  # of a whole answer
    ignore_eos: bool = False  # send vLLM's option that makes answers as long as requested
    usage: bool = True  # ask for token counts at the end of the stream
    max_output_tokens: int | None = None  # of every answer; None: no bound
    as_chat: bool = False  # texts go as chats of one message, where there are no completions

    def output_tokens(self, wanted: int) -> int:
        """The number of tokens to request, at least one."""
        bound = self.max_output_tokens
        return max(wanted if bound is None else min(wanted, bound), 1)

    def priority(self, tenant: str) -> int | None:
        """The class of priority to request; None: none."""
        return self.priorities.get(tenant, self.priorities.get(""))

    def prepare(self, prompt: Prompt, output_tokens: int, tenant: str = "") -> Prepared:
        """Encode a request; may run in another thread."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": self.output_tokens(output_tokens),
            "temperature": 0,
            "stream": True,
        }
        if (priority := self.priority(tenant)) is not None:
            body["priority"] = priority
        if self.usage:
            body["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            body["ignore_eos"] = True
        if isinstance(prompt, np.ndarray):
            prompt = prompt.tolist()
        elif not isinstance(prompt, str) or self.as_chat:
            chat = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt
            encoded = msgspec.json.encode(body | {"messages": chat})
            return Prepared("/v1/chat/completions", encoded)
        return Prepared("/v1/completions", msgspec.json.encode(body | {"prompt": prompt}))


class Endpoint:
    """An HTTP session for many streams at once; use as an async context manager.

    `now_s`: seconds since the run began.
    """

    _session: aiohttp.ClientSession

    def __init__(self, settings: EndpointSettings, now_s: Callable[[], float]) -> None:
        """Raises EndpointError for a malformed URL."""
        self.settings, self.now_s = settings, now_s
        self._url = base_url(settings.url)
        self._headers = {tenant: bearer(key) for tenant, key in settings.keys.items()}

    async def __aenter__(self) -> Endpoint:
        timeout_s = self.settings.timeout_s
        trace = aiohttp.TraceConfig()
        trace.on_request_headers_sent.append(self._note_sent)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, ttl_dns_cache=300, keepalive_timeout=_KEEPALIVE_S
            ),
            timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(timeout_s, _CONNECT_S)),
            headers={"content-type": "application/json", "accept": "text/event-stream"},
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("accept-encoding",),
            trace_configs=[trace],
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def _note_sent(self, _: object, context: SimpleNamespace, __: object) -> None:
        if context.trace_request_ctx is not None:
            context.trace_request_ctx.sent_s = self.now_s()

    async def send(self, prepared: Prepared, record: RequestRecord) -> float | None:
        """Send one attempt and fill `record`; returns the seconds of `Retry-After`, if given.

        Only a cancellation is raised, after the record has been filled.
        """
        retry_after_s = None
        stream = Stream()
        times: list[float] = []
        record.sent_s = self.now_s()
        record.status, record.error, record.error_detail = 0, "", ""
        _read_headers({}, record)
        try:
            async with self._session.post(
                self._url + prepared.path,
                data=prepared.body,
                headers=self._headers.get(record.tenant) or self._headers.get(""),
                trace_request_ctx=record,
            ) as response:
                record.status = response.status
                _read_headers(response.headers, record)
                if response.status == 200:
                    await self._read(response, stream, times)
                else:
                    retry_after_s = _number(response.headers.get("retry-after"))
                    record.error = _status_kind(response.status)
                    record.error_detail = await _refusal(response)
        except StreamFault as fault:
            record.error, record.error_detail = fault.kind, fault.detail
        except asyncio.CancelledError:
            record.error, record.error_detail = "cancelled", "the run was stopped"
            raise
        except (*NETWORK_ERRORS, ValueError) as error:
            record.error, record.error_detail = _kind(error, record.status), detail_of(error)
        finally:
            record.ended_s = self.now_s()
            for key in filter(None, self.settings.keys.values()):
                # Some endpoints repeat the key that they refuse.
                record.error_detail = record.error_detail.replace(key, "…")
            record.error_detail = printable(record.error_detail)
            record.first_token_s = times[0] if times else None
            record.last_token_s = times[-1] if times else None
            record.gaps_s = [round(b - a, 6) for a, b in pairwise(times)]
            reported = stream.completion_tokens
            record.generated_tokens = stream.outputs if reported is None else reported
            record.prompt_tokens = stream.prompt_tokens
        return retry_after_s

    async def decisions(self, limit: int) -> bytes:
        """The last `limit` decisions of our cluster, as JSON; empty if it reports none."""
        headers = self._headers.get("") or next(iter(self._headers.values()), None)
        url, timeout = f"{self._url}/v1/decisions", aiohttp.ClientTimeout(total=PROBE_S)
        options: dict[str, Any] = {"params": {"limit": str(limit)}, "timeout": timeout}
        try:
            async with self._session.get(url, headers=headers, **options) as response:
                return await response.read() if response.status == 200 else b""
        except NETWORK_ERRORS:
            return b""

    async def _read(
        self, response: aiohttp.ClientResponse, stream: Stream, times: list[float]
    ) -> None:
        if response.content_type in _NO_STREAMS:
            head = (await response.content.read(_ERROR_BYTES)).decode("utf-8", "replace")
            response.close()
            raise StreamFault(
                "protocol" if head else "empty",
                f"expected text/event-stream, got {response.content_type}: {head[:120]!r}",
            )
        read = response.content.readany
        while chunk := await read():
            came_s = self.now_s()
            outputs = stream.feed(chunk)
            if outputs:
                times.extend([came_s] * outputs)
        times.extend([self.now_s()] * stream.end())
        if not (stream.done or stream.finished):
            raise StreamFault("cut", f"the stream ended after {stream.outputs} events, unfinished")
        if not stream.outputs:
            raise StreamFault("empty", "the stream ended without a token")


def base_url(url: str) -> str:
    """The base of an endpoint, without `/v1`.

    Raises:
        EndpointError: not an http(s) URL, or one that holds a password.
    """
    parts = http_parts(url)
    if parts is None or parts.query or parts.fragment:
        raise EndpointError(f"{url!r} is no endpoint: give http(s)://HOST[:PORT][/PATH]")
    if "@" in parts.netloc:
        # Refused, and not repeated here: the URL is written down in many places.
        raise EndpointError("the endpoint's URL holds a name or a password: give --key instead")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _read_headers(headers: Mapping[str, str], record: RequestRecord) -> None:
    """Take our cluster's headers into the record, in place of those of the attempt before."""
    record.request_id = printable(headers.get("x-request-id", ""))
    record.node = printable(headers.get("x-kappa-node", ""))
    ours = headers if record.node else {}
    record.paced = ours.get("x-kappa-paced", "").startswith("true")
    record.reason = printable(ours.get("x-kappa-reason", ""))
    record.ratio = _number(ours.get("x-kappa-ratio"))
    record.crit = _number(ours.get("x-kappa-crit"))
    predicted_ms = _number(ours.get("x-kappa-predicted-ttft-ms"))
    record.predicted_ttft_s = None if predicted_ms is None else predicted_ms / 1e3


async def _refusal(response: aiohttp.ClientResponse) -> str:
    """The message of an answer other than 200."""
    body = await response.content.read(_ERROR_BYTES)
    if not response.content.at_eof():
        response.close()
    try:
        return error_message(msgspec.json.decode(body))
    except msgspec.DecodeError:
        return error_message(body.decode("utf-8", "replace"))


def _status_kind(status: int) -> str:
    return str(status) if status in (401, 429, 503) else f"http_{status}"


def _kind(error: BaseException, status: int) -> str:
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return "connect"
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, aiohttp.ClientResponseError):
        return "protocol"
    if status and status != 200:
        return _status_kind(status)
    if isinstance(error, aiohttp.ClientError | OSError):
        return "cut" if status else "connect"
    return "protocol"


def detail_of(error: BaseException) -> str:
    """An exception's message in one line."""
    return error_message(str(error) or type(error).__name__)


def error_message(error: Any) -> str:
    """The message of OpenAI's error object, or any other, in one line."""
    if isinstance(error, dict):
        inner = error.get("error", error)
        error = inner.get("message", inner) if isinstance(inner, dict) else inner
    return str(error).replace("\n", " ")[:300]


def printable(text: str) -> str:
    """Foreign text without unprintable characters, which could control a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _number(text: str | None) -> float | None:
    """A header's finite number, zero or above; None for anything else."""
    try:
        value = float(text) if text else math.nan
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None


# -- the stream -----------------------------------------------------------------------------------


class _Delta(msgspec.Struct):
    role: str | None = None
    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: Any = None


# The integers that a table's column can hold.
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class _Usage(msgspec.Struct):
    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class Stream:
    """Parser of one streamed answer; token counts are None until reported."""

    __slots__ = ("_rest", "completion_tokens", "done", "finished", "outputs", "prompt_tokens")

    def __init__(self) -> None:
        self._rest = b""
        self.outputs = 0  # events with output
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.finished = self.done = False

    def feed(self, chunk: bytes) -> int:
        """Read a chunk; returns the number of events with output that ended in it.

        Raises:
            StreamFault: an event that is no JSON of OpenAI's, an error of the endpoint, or
                bytes without end that are no events.
        """
        before = self.outputs
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._line(line)
        if len(self._rest) > _LONGEST_EVENT_BYTES:
            raise StreamFault("protocol", f"an event longer than {_LONGEST_EVENT_BYTES} bytes")
        return self.outputs - before

    def end(self) -> int:
        """Read a last line without its line break at the stream's end; returns as `feed`.

        A last line that cannot be read is a stream cut in the middle, which its lack of an end
        shows already.
        """
        before = self.outputs
        rest, self._rest = self._rest, b""
        try:
            self._line(rest)
        except StreamFault as fault:
            if fault.kind == "stream_error":
                raise
        return self.outputs - before

    def _line(self, line: bytes) -> None:
        if not line.startswith(b"data:"):
            if not line.strip() or line.startswith((b":", b"event:", b"id:", b"retry:")):
                return
            raise StreamFault("protocol", f"expected server-sent events, got {_shown(line)}")
        payload = line[5:].strip()
        if payload == b"[DONE]":
            self.done = True
            return
        try:
            event = _decode(payload)
        except msgspec.DecodeError as error:
            raise StreamFault("bad_json", f"{error}: {_shown(payload)}") from None
        if event.error is not None:
            raise StreamFault("stream_error", error_message(event.error))
        if event.usage is not None:
            self.prompt_tokens = event.usage.prompt_tokens
            self.completion_tokens = event.usage.completion_tokens
        if event.choices:
            self._choice(event.choices[0])

    def _choice(self, choice: _Choice) -> None:
        ends = choice.finish_reason is not None
        self.finished = self.finished or ends
        delta = choice.delta
        if delta is None:
            has_text, announces = bool(choice.text), choice.text is None
        else:
            texts = (delta.content, delta.reasoning_content, delta.reasoning, delta.tool_calls)
            has_text, announces = any(texts), delta.role is not None
        # The only event of an answer of one token may have no text and end it.
        if has_text or (not announces and (not ends or not self.outputs)):
            self.outputs += 1


def _shown(data: bytes) -> str:
    return repr(data[:80].decode("utf-8", "replace"))

"""Sends one request of a load test to any OpenAI endpoint and times its stream.

Chats go to `/v1/chat/completions`; texts and token ids to `/v1/completions`. Nothing that the
endpoint does raises here: a failure becomes the record's kind of error. Little is done per chunk,
as thousands of streams share one core; bodies are encoded before they are due. The headers of our
own cluster are read where they are there. Called by the runner.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace, TracebackType
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
import numpy as np

from loadtest.events import Stream, StreamFault, error_message
from loadtest.record import Record
from workload.replay import Prompt

_ERROR_BYTES = 4096
_CONNECT_S = 30.0
# Below uvicorn's 5 s: a connection that the server is about to close is never used again.
_KEEPALIVE_S = 2.0
PROBE_S = 10.0
"""What a question about the endpoint itself may take."""
_NO_STREAMS = ("application/json", "text/html")


class EndpointError(ValueError):
    """The endpoint cannot be used as asked; the message says where, why and what to do."""


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    """Where and how requests are sent.

    url: base, with or without `/v1`; model: as the endpoint names it. keys: by tenant, with "" for
    all others. timeout_s: for a whole answer. ignore_eos: whether to send vLLM's option that
    makes answers as long as asked. usage: ask for token counts at the end of the stream.
    max_output_tokens: bound on every answer, None for what the workload says. as_chat: texts go as
    chats of one message, for endpoints that know no completions.
    """

    url: str
    model: str
    keys: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 300.0
    ignore_eos: bool = False
    usage: bool = True
    max_output_tokens: int | None = None
    as_chat: bool = False

    def __post_init__(self) -> None:
        """Refuse what can never be sent anywhere."""
        base_url(self.url)
        if not (math.isfinite(self.timeout_s) and self.timeout_s > 0):
            raise EndpointError(f"the timeout is {self.timeout_s} s: give seconds, above zero")
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise EndpointError(f"the longest output is {self.max_output_tokens}: give 1 or more")

    def output_tokens(self, asked: int) -> int:
        """How many tokens to ask for, at least one."""
        bound = self.max_output_tokens
        return max(asked if bound is None else min(asked, bound), 1)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request ready to be sent."""

    path: str
    body: bytes


class Endpoint:
    """An HTTP session for many streams at once; use as an async context manager.

    `now_s` tells seconds since the run began.
    """

    def __init__(self, settings: EndpointSettings, now_s: Callable[[], float]) -> None:
        self.settings, self._now_s = settings, now_s
        self._url = base_url(settings.url)
        self._headers = {
            tenant: {"authorization": f"Bearer {key}"} for tenant, key in settings.keys.items()
        }
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Endpoint:
        self._session = _session(self.settings.timeout_s, self._sent)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()

    def prepare(self, prompt: Prompt, output_tokens: int) -> Prepared:
        """Encode a request; may run in another thread."""
        settings = self.settings
        body: dict[str, Any] = {
            "model": settings.model,
            "max_tokens": settings.output_tokens(output_tokens),
            "temperature": 0,
            "stream": True,
        }
        if settings.usage:
            body["stream_options"] = {"include_usage": True}
        if settings.ignore_eos:
            body["ignore_eos"] = True
        path = "/v1/completions"
        if isinstance(prompt, str) and settings.as_chat:
            prompt = ({"role": "user", "content": prompt},)
        if isinstance(prompt, str):
            body["prompt"] = prompt
        elif isinstance(prompt, np.ndarray):
            body["prompt"] = prompt.tolist()
        else:
            path, body["messages"] = "/v1/chat/completions", prompt
        return Prepared(path, msgspec.json.encode(body))

    async def send(self, prepared: Prepared, record: Record) -> float | None:
        """Send one attempt and fill `record` with what came; returns the seconds of a
        `Retry-After`, if the endpoint gave one.

        Only a cancellation gets through, after the record has been filled.
        """
        retry_after_s = None
        stream = Stream()
        times: list[float] = []
        record.sent_s = self._now_s()
        record.status, record.error, record.error_detail = 0, "", ""
        _read_headers({}, record)
        try:
            async with self._opened().post(
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
                    retry_after_s = _seconds(response.headers.get("retry-after"))
                    await _refused(response, record)
        except StreamFault as fault:
            record.error, record.error_detail = fault.kind, fault.detail
        except asyncio.CancelledError:
            record.error, record.error_detail = "cancelled", "the run was stopped"
            raise
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            record.error, record.error_detail = _kind(error, record.status), detail_of(error)
        finally:
            record.ended_s = self._now_s()
            record.error_detail = self._plain(record.error_detail)
            _note(record, stream, times)
        return retry_after_s

    async def decisions(self, limit: int) -> bytes:
        """The last `limit` decisions of our cluster, as JSON; empty if it tells none."""
        headers = self._headers.get("") or next(iter(self._headers.values()), None)
        try:
            async with self._opened().get(
                f"{self._url}/v1/decisions",
                params={"limit": str(limit)},
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=PROBE_S),
            ) as response:
                return await response.read() if response.status == 200 else b""
        except (aiohttp.ClientError, TimeoutError, OSError):
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
        now_s = self._now_s
        read = response.content.readany
        while piece := await read():
            came_s = now_s()
            outputs = stream.feed(piece)
            if outputs:
                times.extend([came_s] * outputs)
        times.extend([now_s()] * stream.end())
        if not (stream.done or stream.finished):
            raise StreamFault("cut", f"the stream ended after {stream.outputs} events, unfinished")
        if not stream.outputs:
            raise StreamFault("empty", "the stream ended without a token")

    def _plain(self, detail: str) -> str:
        """What an endpoint said, fit to be kept: some repeat the key that they refuse."""
        for key in filter(None, self.settings.keys.values()):
            detail = detail.replace(key, "…")
        return printable(detail)

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("use Endpoint as a context manager")
        return self._session

    async def _sent(
        self, session: aiohttp.ClientSession, context: SimpleNamespace, params: Any
    ) -> None:
        record = context.trace_request_ctx
        if record is not None:
            record.sent_s = self._now_s()


def base_url(url: str) -> str:
    """The base of an endpoint, without `/v1`.

    Raises:
        EndpointError: not an http(s) URL, or one that holds a password.
    """
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port
    except ValueError:
        is_usable = False
    if not is_usable or parts.query or parts.fragment:
        raise EndpointError(f"{url!r} is no endpoint: give http(s)://HOST[:PORT][/PATH]")
    if "@" in parts.netloc:
        # Refused, and not repeated here: the URL is written down in many places.
        raise EndpointError("the endpoint's URL holds a name or a password: give --key instead")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _session(timeout_s: float, sent: Any) -> aiohttp.ClientSession:
    trace = aiohttp.TraceConfig()
    trace.on_request_headers_sent.append(sent)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=300, keepalive_timeout=_KEEPALIVE_S),
        timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(timeout_s, _CONNECT_S)),
        headers={"content-type": "application/json", "accept": "text/event-stream"},
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("accept-encoding",),
        trace_configs=[trace],
    )


def _read_headers(headers: Mapping[str, str], record: Record) -> None:
    """What our cluster says of the attempt; nothing is left of the attempt before."""
    record.request_id = printable(headers.get("x-request-id", ""))
    record.node = printable(headers.get("x-kappa-node", ""))
    ours = headers if record.node else {}
    record.paced = ours.get("x-kappa-paced") == "true"
    record.reason = printable(ours.get("x-kappa-reason", ""))
    record.ratio = _seconds(ours.get("x-kappa-ratio"))
    record.crit = _seconds(ours.get("x-kappa-crit"))
    predicted_ms = _seconds(ours.get("x-kappa-predicted-ttft-ms"))
    record.predicted_ttft_s = None if predicted_ms is None else predicted_ms / 1e3


async def _refused(response: aiohttp.ClientResponse, record: Record) -> None:
    """An answer other than 200: its kind, and what it says."""
    status = response.status
    record.error = str(status) if status in (401, 429, 503) else f"http_{status}"
    said = await response.content.read(_ERROR_BYTES)
    if not response.content.at_eof():
        response.close()
    try:
        record.error_detail = error_message(msgspec.json.decode(said))
    except msgspec.DecodeError:
        record.error_detail = error_message(said.decode("utf-8", "replace"))


def _kind(error: BaseException, status: int) -> str:
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return "connect"
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, aiohttp.ClientResponseError):
        return "protocol"
    if status and status != 200:
        return str(status) if status in (401, 429, 503) else f"http_{status}"
    if isinstance(error, aiohttp.ClientError | OSError):
        return "cut" if status else "connect"
    return "protocol"


def detail_of(error: BaseException) -> str:
    """What an exception says, in a line."""
    text = str(error) or type(error).__name__
    return text.replace("\n", " ")[:300]


def printable(text: str) -> str:
    """Text of others without what a journal cannot hold, or a terminal would obey."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _note(record: Record, stream: Stream, times: list[float]) -> None:
    """Times and counts of what came, also if the stream broke."""
    record.first_token_s = times[0] if times else None
    record.last_token_s = times[-1] if times else None
    record.gaps_s = [round(b - a, 6) for a, b in pairwise(times)]
    told = stream.completion_tokens
    record.generated_tokens = stream.outputs if told is None else told
    record.prompt_tokens = stream.prompt_tokens


def _seconds(text: str | None) -> float | None:
    """A finite number of a header that is zero or above; None for anything else."""
    try:
        value = float(text) if text else math.nan
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None

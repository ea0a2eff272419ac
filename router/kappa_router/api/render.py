"""From a request's body to the token ids that the engine will compute, once, at the decider.

Uses the model's own tokenizer and chat template (`kappa_router.api.tokenizer`), as the engine does.
What it cannot render for sure (images) it does not guess: routing then fails open, and charges and
admission control take an upper bound of its length. It is work like any other: in two lanes, each
with one prompt at a time and a queue before it that is fair to tenants. Short prompts are tokenized
by a thread, which their size keeps busy for milliseconds; long ones by a process that can be ended;
tiny ones by the event loop itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from kappa.incremental_tokenizer import Ids
from kappa_router.api import errors
from kappa_router.api.fair_queue import FairTurns
from kappa_router.api.request_body import RequestBody
from kappa_router.api.tenants import Tenant
from kappa_router.api.tokenizer import PromptTokenizer, PromptTooLong
from kappa_router.api.tokenizer_process import TokenizerProcess

# What vLLM passes on of a message; a template sees nothing else.
_KEYS = ("role", "content", "name", "tool_call_id", "tool_calls", "reasoning", "task")

# What a template puts around a message, and the most that one image, sound or video comes to: as
# many as the larger models' default (Qwen2-VL's 16,384 for an image). An engine's exact count is
# known only to itself.
_MESSAGE_TOKENS = 8
_MEDIA_TOKENS = 16_384

SHORT_BYTES = 16 << 10
"""Of new text that a thread tokenizes: about 10 ms of work."""
# Of a body that the event loop tokenizes itself: to wake a thread, and be woken, takes longer.
_TINY_BYTES = 2 << 10
# The most bytes and messages that a thread renders: a model's template may take seconds over more,
# and only a process can be ended.
_LIGHT_BYTES, _LIGHT_MESSAGES = 1 << 20, 1024
# To look up known text takes an eightieth of encoding it.
_LOOK_UP_SHARE = 80
_MOST_PROCESSES = 4

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A request's prompt."""

    # None for several prompts, or for one that could not be rendered.
    token_ids: np.ndarray | None
    # Of all its prompts together, or the most that they can come to.
    tokens: int
    # Of the longest one; 0 where that is not certain: only the engine can hold it to its context.
    longest_tokens: int = 0


class PromptRenderer:
    """Renders and tokenizes for one model."""

    def __init__(self, source: str) -> None:
        """Load the tokenizer of `source` (folder or Hugging Face name)."""
        self.source = source
        self.tokenizer = PromptTokenizer(source)

    def render(
        self, body: RequestBody, tokens: Callable[[dict[str, Any]], np.ndarray] | None = None
    ) -> TokenizedPrompt:
        """The prompt of a chat or completion body; bounded where its tokens are not certain.

        `tokens`: turns what `PromptTokenizer.tokens` takes into ids; by default that.
        """
        tokens = tokens or self.tokenizer.tokens
        prompts = self.plain(body)
        if not prompts or any(prompt is None for prompt in prompts):
            return bounded(body)
        ids = [
            tokens(each) if isinstance(each, dict) else np.asarray(each, dtype=np.int64)
            for each in prompts
        ]
        lengths = [len(each) for each in ids]
        return TokenizedPrompt(ids[0] if len(ids) == 1 else None, sum(lengths), max(lengths))

    def plain(self, body: RequestBody) -> list[list[int] | dict[str, Any] | None]:
        """Each prompt as `PromptTokenizer.tokens` takes it, of JSON's types; the tokens themselves
        where a body holds them; None where they are not certain."""
        if body.is_chat:
            return [self._chat(body)]
        special = body.fields.get("add_special_tokens", True)
        return [
            {"text": one, "add_special_tokens": special} if isinstance(one, str) else one
            for one in body.prompts
        ]

    def _chat(self, body: RequestBody) -> dict[str, Any] | None:
        messages, fields = [self._message(message) for message in body.messages], body.fields
        extra = dict(fields.get("chat_template_kwargs") or {})
        effort = fields.get("reasoning_effort")
        if effort is not None:
            extra = {"enable_thinking": effort != "none", **extra, "reasoning_effort": effort}
        chat = {
            "conversation": messages,
            "tools": shown_tools(fields.get("tools")) or None,
            "documents": fields.get("documents"),
            "chat_template": None,
            "add_generation_prompt": fields.get("add_generation_prompt", True),
            "continue_final_message": fields.get("continue_final_message", False),
        }
        if None in messages or extra.keys() & chat.keys():
            return None
        special = fields.get("add_special_tokens", False)
        return {"chat": chat | extra, "add_special_tokens": special}

    def _message(self, given: Mapping[str, Any]) -> dict[str, Any] | None:
        """A message as the template sees it: content as a string, arguments as objects."""
        plain = {key: given[key] for key in _KEYS if given.get(key) is not None}
        content = given.get("content")
        if self.tokenizer.takes_parts and isinstance(content, list) and len(content) > 1:
            return None
        if plain.get("role") == "developer" and not self.tokenizer.takes_developers:
            return None
        if isinstance(content, list):
            # As vLLM joins it, if it holds no more than text.
            parts = [{"text": part} if isinstance(part, str) else part for part in content]
            if any(p.get("type", "text") != "text" or p.get("text") is None for p in parts):
                return None
            content = "\n".join(part["text"] for part in parts if part["text"])
        plain["content"] = content or ""
        thought = plain.get("reasoning", given.get("reasoning_content"))
        if thought is not None:
            plain["reasoning"] = plain["reasoning_content"] = thought
        calls = plain.pop("tool_calls", None)
        if calls:
            plain["tool_calls"] = [_call(call) for call in calls]
        return plain


def shown_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Tools as vLLM shows them to a template: with all that its schema names, in its order."""
    return [
        {"type": tool.get("type") or "function", "function": _shown(tool.get("function") or {})}
        for tool in tools or ()
    ]


def _shown(function: Mapping[str, Any]) -> dict[str, Any]:
    shown = {name: function.get(name) for name in ("name", "description", "parameters")}
    strict = function.get("strict")
    return shown if strict is None else {**shown, "strict": strict}


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call in the order of vLLM's schema: templates show it as it is."""
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            arguments = {}
    # As vLLM: anything but an object counts as an empty one.
    shown = {"arguments": arguments if isinstance(arguments, dict) else {}}
    if "name" in function:
        shown["name"] = function["name"]
    made = {"id": call.get("id"), "function": shown, "type": call.get("type")}
    return {name: value for name, value in made.items() if value is not None}


def bounded(body: RequestBody) -> TokenizedPrompt:
    """A bound for a prompt that is not tokenized: a token for each byte, and `_MEDIA_TOKENS` for
    each image, sound and video."""
    if not body.is_chat:
        tokens = sum(len(one) if isinstance(one, list) else _bytes_in(one) for one in body.prompts)
        return TokenizedPrompt(None, max(tokens, 1))
    tokens = _bytes_in([shown_tools(body.fields.get("tools")), body.fields.get("documents")])
    for message in body.messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else [content]:
            kind = str(part.get("type")) if isinstance(part, Mapping) else ""
            tokens += _MEDIA_TOKENS if kind.endswith(("_url", "_audio")) else _bytes_in(part)
        rest = {name: value for name, value in message.items() if name != "content"}
        tokens += _MESSAGE_TOKENS + _bytes_in(rest)
    return TokenizedPrompt(None, tokens)


def _bytes_in(value: Any) -> int:
    """UTF-8 bytes of all that a JSON value shows."""
    if isinstance(value, str):
        return len(value.encode(errors="replace"))
    if isinstance(value, Mapping):
        return sum(_bytes_in(key) + _bytes_in(one) for key, one in value.items())
    if isinstance(value, list | tuple):
        return sum(map(_bytes_in, value))
    return 0 if value is None else len(str(value))


# -- lanes ------------------------------------------------------------------------------------


class _MuchIsNew(Exception):  # for another lane, not a fault
    """More of a prompt is new than a thread should encode; `args`: how many characters."""


class Tokenizing:
    """Turns prompts into tokens for all requests of a decider, whichever model they ask for.

    A thread renders a prompt and encodes its new part, if that is short. Else processes encode
    it, one for each core at most; each takes one prompt at a time.
    """

    def __init__(
        self,
        renderers: Mapping[str, PromptRenderer],
        processes: Sequence[TokenizerProcess] | None = None,
    ) -> None:
        """`renderers`: by model; `processes`: encode long texts for all of them; by default as many
        as there are cores, at most four, of the renderers' tokenizers."""
        self._renderers = dict(renderers)
        if processes is None:
            sources = dict.fromkeys(renderer.source for renderer in renderers.values())
            count = max(1, min(len(os.sched_getaffinity(0)), _MOST_PROCESSES))
            processes = [TokenizerProcess(*sources) for _ in range(count)]
        self._processes = tuple(processes)
        # Last in, first out: a second one is started only where two prompts are long at a time.
        self._idle = list(reversed(self._processes))
        self._short = TokenizingLane("tokenize")
        self._long = TokenizingLane("tokenize-long", len(self._processes))

    async def tokens(
        self,
        model: str,
        body: RequestBody,
        body_bytes: int,
        tenant: Tenant,
        most_tokens: int | None,
    ) -> TokenizedPrompt:
        """A body's prompt as token ids of the model, int64; bounded in length if it cannot be
        rendered here.

        most_tokens: the largest context of any worker of the model; None: not known.

        Raises:
            ApiError: 400, it cannot fit `most_tokens`, or tokenizing it was ended; 503, there is no
                process to do it.
            Exception: whatever the template raises.
        """
        renderer, new_chars = self._renderers[model], body_bytes

        def little(texts: list[str]) -> list[Ids]:
            chars = sum(map(len, texts))
            if chars > SHORT_BYTES:
                raise _MuchIsNew(chars)
            return renderer.tokenizer.encode(texts)

        def here(plain: dict[str, Any]) -> np.ndarray:
            return renderer.tokenizer.tokens(plain, most_tokens, tenant.name, little)

        def there(plain: dict[str, Any]) -> np.ndarray:
            process = self._idle.pop()
            try:
                if not _is_light(body, body_bytes):
                    return process.tokens(plain, most_tokens, renderer.source, tenant.name)
                encode = partial(process.encode, source=renderer.source)
                return renderer.tokenizer.tokens(plain, most_tokens, tenant.name, encode)
            finally:
                self._idle.append(process)

        try:
            if body_bytes <= _TINY_BYTES:
                with contextlib.suppress(_MuchIsNew):
                    return renderer.render(body, here)
            if _is_light(body, body_bytes):
                work = partial(renderer.render, body, here)
                cost = min(body_bytes, SHORT_BYTES + body_bytes // _LOOK_UP_SHARE)
                try:
                    return await self._short.run(tenant, cost, work)
                except _MuchIsNew as much:
                    new_chars = much.args[0]
            return await self._long.run(tenant, new_chars, partial(renderer.render, body, there))
        except PromptTooLong as error:
            token_bytes = renderer.tokenizer.longest_token_bytes
            assert token_bytes is not None
            raise errors.PROMPT_TOO_LONG(
                limit_tokens=most_tokens,
                text_bytes=error.args[0],
                tokens=-(-error.args[0] // token_bytes),
            ) from None

    def close(self) -> None:
        """End the processes, and let the threads go."""
        self._short.close()
        self._long.close()
        for process in self._processes:
            process.close()


def _is_light(body: RequestBody, body_bytes: int) -> bool:
    """Whether a thread may render a body: one without text has nothing to render."""
    if not body.is_chat and not any(isinstance(one, str) for one in body.prompts[:1]):
        return True
    return body_bytes <= _LIGHT_BYTES and len(body.messages) <= _LIGHT_MESSAGES


class TokenizingLane:
    """Runs `width` pieces of work at a time in threads of its own, in turns."""

    def __init__(self, name: str, width: int = 1) -> None:
        self._threads = ThreadPoolExecutor(width, thread_name_prefix=name)
        self._turns = FairTurns(width)

    async def run(self, tenant: Tenant, cost: int, work: Callable[[], T]) -> T:
        """The result of `work`, or what it raises. Cancelled while it waits, it leaves the queue;
        cancelled later, the work goes on to its end, and only then comes the next."""
        await self._turns.take(tenant, cost)
        job = asyncio.get_running_loop().run_in_executor(self._threads, work)
        job.add_done_callback(self._done)
        return await asyncio.shield(job)

    def close(self) -> None:
        """Let the threads go."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _done(self, job: asyncio.Future[Any]) -> None:
        # Its waiter may have left; an error that is never looked at would be logged.
        if not job.cancelled():
            job.exception()
        self._turns.leave()

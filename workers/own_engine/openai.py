"""OpenAI's shapes around our own engine: a body in, its limits checked; tokens out as events. What
this engine cannot do (log probabilities, several answers, penalties, …) is refused with 400 by name
rather than ignored. Pure."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.sampling import Sampling
from engine.sequence import EngineRequest
from kappa.protocol import APPROX_KEY, PLAN_KEY, PROMPT_KEY, REQUEST_ID_KEY
from workers.request_metadata import DEFAULT_TENANT, tenant_of

# What a body may hold without meaning anything that this engine would have to do.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "prompt_logprobs": (None,),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "top_k": (None, 0, -1),
    "min_p": (None, 0, 0.0),
    "min_tokens": (None, 0),
    "use_beam_search": (None, False),
    "structured_outputs": (None,),
    "allowed_token_ids": (None, []),
    "bad_words": (None, []),
    "tools": (None, []),
    "suffix": (None, ""),
    "echo": (None, False),
    "prompt_embeds": (None,),
    "return_token_ids": (None, False),
}
_MOST_TOKENS = 1 << 24


class BodyRefused(ValueError):
    """A body that this engine cannot serve; `param` names the field."""

    def __init__(self, param: str, reason: str) -> None:
        super().__init__(f"{param}: {reason}")
        self.param = param


@dataclass(frozen=True, slots=True)
class Body:
    """A chat or completion body, read: what the engine is asked for, and how the answer looks."""

    request: EngineRequest
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool


def read_body(body: Any, eos_tokens: Sequence[int]) -> Body:
    """Read a chat or completion body, Ray Serve LLM's, marked by the decider. eos_tokens: end an
    answer unless the body says `ignore_eos`.

    Raises:
        BodyRefused: names the field.
    """
    for name, harmless in _UNSUPPORTED.items():
        if getattr(body, name, None) not in harmless:
            raise BodyRefused(name, "the engine of kind torch does not do this; use vllm for it")
    if getattr(getattr(body, "response_format", None), "type", "text") != "text":
        raise BodyRefused("response_format", "the engine of kind torch gives text only")
    extra = getattr(body, "vllm_xargs", None) or {}
    if not extra.get(PROMPT_KEY):
        raise BodyRefused("prompt", "came without its tokens: send it through the kappa decider")
    # The older field warns when it is read; a body without either may use all that is left.
    limits = (body.__dict__.get(name) for name in ("max_completion_tokens", "max_tokens"))
    request = EngineRequest(
        tokens=np.frombuffer(base64.b64decode(extra[PROMPT_KEY]), dtype="<i4").tolist(),
        max_tokens=int(next((n for n in limits if n is not None), _MOST_TOKENS)),
        sampling=_sampling(body, eos_tokens),
        tenant=tenant_of(extra) or DEFAULT_TENANT,
        priority=int(getattr(body, "priority", 0) or 0),
        planner=str(extra.get(PLAN_KEY, "")) or None,
        salt=str(getattr(body, "cache_salt", None) or ""),
        name=str(extra.get(REQUEST_ID_KEY, getattr(body, "request_id", ""))),
        approx=bool(extra.get(APPROX_KEY)),
    )
    stop, options = getattr(body, "stop", None) or (), getattr(body, "stream_options", None)
    return Body(
        request,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stream=bool(getattr(body, "stream", False)),
        include_usage=bool(getattr(options, "include_usage", False)),
    )


def _sampling(body: Any, eos_tokens: Sequence[int]) -> Sampling:
    stops = set(getattr(body, "stop_token_ids", None) or ())
    if not getattr(body, "ignore_eos", False):
        stops |= set(eos_tokens)
    temperature, top_p = getattr(body, "temperature", None), getattr(body, "top_p", None)
    try:
        return Sampling(
            temperature=1.0 if temperature is None else float(temperature),
            top_p=1.0 if top_p is None else float(top_p),
            seed=getattr(body, "seed", None),
            stop_tokens=frozenset(stops),
        )
    except ValueError as error:
        name = "top_p" if "top_p" in str(error) else "temperature"
        raise BodyRefused(name, str(error)) from None


class Detokenizer:
    """Text of tokens as they come; a character that is not complete yet waits for its rest. The
    prompt's last tokens tell whether the answer begins with a space."""

    _LOOK_BACK = 6

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._tokens = list(prompt[-self._LOOK_BACK :])
        self._shown = len(self._tokens)
        self._start = 0

    def push(self, token: int) -> str:
        """The text that this token completes, perhaps none."""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._start : self._shown])
        text = self._decode(self._tokens[self._start :])
        if len(text) <= len(before) or text.endswith("�"):
            return ""
        self._start, self._shown = self._shown, len(self._tokens)
        return text[len(before) :]

    def rest(self) -> str:
        """What is left at the end, incomplete characters included."""
        before = self._decode(self._tokens[self._start : self._shown])
        return self._decode(self._tokens[self._start :])[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))


class Stopper:
    """Cuts a text at the first stop string, which may come in chunks."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = [each for each in stop if each]
        self._held = ""
        self.stopped = False

    def push(self, text: str, last: bool = False) -> str:
        """What may be shown now; keeps back what could be the start of a stop string."""
        if self.stopped:
            return ""
        text = self._held + text
        found = [place for each in self._stop if (place := text.find(each)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = 0 if last else max((_overlap(text, each) for each in self._stop), default=0)
        shown, self._held = text[: len(text) - keep], text[len(text) - keep :]
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


class AnswerText:
    """An answer's text as it grows, cut at a stop string."""

    def __init__(self, tokenizer: Any, body: Body) -> None:
        self._detokenizer = Detokenizer(tokenizer, body.request.tokens)
        self._stopper = Stopper(body.stop)

    @property
    def stopped(self) -> bool:
        return self._stopper.stopped

    def push(self, tokens: list[int], last: bool) -> str:
        """The text that these tokens add; all that is left with the last."""
        text = "".join(self._detokenizer.push(token) for token in tokens)
        return self._stopper.push(text + self._detokenizer.rest() if last else text, last)


class OpenAIAnswer:
    """One request's answer, as OpenAI's objects. kind: "chat" or "completions". created_s: since
    the epoch."""

    def __init__(
        self, kind: str, request_id: str, model: str, created_s: float, prompt_tokens: int
    ) -> None:
        self._chat = kind == "chat"
        self._object = "chat.completion" if self._chat else "text_completion"
        name = f"{'chatcmpl' if self._chat else 'cmpl'}-{request_id}"
        self._base = {"id": name, "created": int(created_s), "model": model}
        self._prompt_tokens = prompt_tokens

    def opening(self) -> str:
        """A chat's first event names the role; completions have none."""
        return self._choice({"role": "assistant", "content": ""}) if self._chat else ""

    def chunk(self, text: str, finish_reason: str | None = None) -> str:
        """An event with some text, and at the end the reason why it ended."""
        return self._choice({"content": text} if self._chat else text, finish_reason)

    def closing(self, usage: Mapping[str, Any] | None) -> str:
        """The usage, if it was asked for, and the end of the stream."""
        extra = "" if usage is None else self._event(choices=[], usage=dict(usage))
        return f"{extra}data: [DONE]\n\n"

    def usage(
        self, output_tokens: int, cached_tokens: int, approximate: int | None = None
    ) -> dict[str, Any]:
        """Tokens of prompt and answer; cached: found on the device or brought back from host;
        approximate: of the answer, computed sparsely, None where none may be."""
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": self._prompt_tokens + output_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
            **({} if approximate is None else {"approximate_tokens": approximate}),
        }

    def whole(self, text: str, finish_reason: str, usage: Mapping[str, Any]) -> dict[str, Any]:
        said = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        choice = {"index": 0, "finish_reason": finish_reason, **said}
        return {**self._base, "object": self._object, "choices": [choice], "usage": dict(usage)}

    def _choice(self, content: Any, finish_reason: str | None = None) -> str:
        field = "delta" if self._chat else "text"
        choice = {"index": 0, field: content, "logprobs": None, "finish_reason": finish_reason}
        return self._event(choices=[choice])

    def _event(self, **fields: Any) -> str:
        kind = f"{self._object}.chunk" if self._chat else self._object
        # Compact, as vLLM's: the decider counts tokens by the marks of its events.
        event = json.dumps({**self._base, "object": kind, **fields}, separators=(",", ":"))
        return f"data: {event}\n\n"

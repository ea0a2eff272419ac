"""From a request's body to the token ids that the engine will compute, once, at the ingress.

Uses the model's own tokenizer and chat template (`router.api.tokenizer`), as the engine does. What
it cannot render for sure (images) it does not guess: routing then fails open, and charges and
admission control take an upper bound of its length. Slow work: call it off the event loop.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from ray.serve.llm.openai_api_models import ChatCompletionRequest

from router.api.tokenizer import PromptTokenizer

# What vLLM passes on of a message; a template sees nothing else.
_KEYS = ("role", "content", "name", "tool_call_id", "tool_calls", "reasoning", "task")

# What a template puts around a message, and the most that one image, sound or video comes to: as
# many as the larger models' default (Qwen2-VL's 16,384 for an image). An engine's exact count is
# known only to itself.
_MESSAGE_TOKENS = 8
_MEDIA_TOKENS = 16_384


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A request's prompt. token_ids: None for several, or one that could not be rendered.

    tokens: of all its prompts together, or the most that they can come to; longest_tokens: of the
    longest one, as far as it is certain, else 0: then only the engine can hold it to its context.
    """

    token_ids: np.ndarray | None
    tokens: int
    longest_tokens: int = 0


class PromptRenderer:
    """Renders and tokenizes for one model."""

    def __init__(self, source: str, chat_template: str | None = None) -> None:
        """Load the tokenizer of `source` (folder or Hugging Face name)."""
        self.source = source
        self.tokenizer = PromptTokenizer(source, chat_template)

    def render(
        self, body: Any, tokens: Callable[[dict[str, Any]], np.ndarray] | None = None
    ) -> TokenizedPrompt:
        """The prompt of a chat or completion body; bounded where its tokens are not certain.

        `tokens`: turns what `PromptTokenizer.tokens` takes into ids; by default that.
        """
        tokens = self.tokenizer.tokens if tokens is None else tokens
        prompts = self.plain(body)
        if not prompts or any(prompt is None for prompt in prompts):
            return bounded(body)
        ids = [
            tokens(each) if isinstance(each, dict) else np.asarray(each, dtype=np.int64)
            for each in prompts
        ]
        lengths = [len(each) for each in ids]
        return TokenizedPrompt(ids[0] if len(ids) == 1 else None, sum(lengths), max(lengths))

    def plain(self, body: Any) -> list[list[int] | dict[str, Any] | None]:
        """For each prompt what `PromptTokenizer.tokens` takes, of JSON's types; the tokens
        themselves where a body holds them; None where they are not certain."""
        # A completion may carry a field of any name: its type decides, as it does in the engine.
        if isinstance(body, ChatCompletionRequest):
            return [self._chat(body)]
        prompt = body.prompt
        if not prompt:
            return []
        if isinstance(prompt, list) and not isinstance(prompt[0], str):
            return [prompt] if isinstance(prompt[0], int) else prompt
        texts = [prompt] if isinstance(prompt, str) else prompt
        return [{"text": text, "add_special_tokens": body.add_special_tokens} for text in texts]

    def _chat(self, body: Any) -> dict[str, Any] | None:
        messages = [self._message(message) for message in body.messages]
        if any(message is None for message in messages):
            return None
        tools = [tool.model_dump() for tool in body.tools] if getattr(body, "tools", None) else None
        extra = dict(getattr(body, "chat_template_kwargs", None) or {})
        effort = getattr(body, "reasoning_effort", None)
        if effort is not None:
            extra = {"enable_thinking": effort != "none", **extra, "reasoning_effort": effort}
        chat = {
            "conversation": messages,
            "tools": tools,
            "documents": getattr(body, "documents", None),
            "chat_template": None,
            "add_generation_prompt": getattr(body, "add_generation_prompt", True),
            "continue_final_message": getattr(body, "continue_final_message", False),
        }
        if extra.keys() & chat.keys():
            return None
        return {
            "chat": chat | extra,
            "add_special_tokens": bool(getattr(body, "add_special_tokens", False)),
        }

    def _message(self, message: Any) -> dict[str, Any] | None:
        """A message as the template sees it: content as a string, arguments as objects."""
        given = _as_dict(message)
        plain = {key: given[key] for key in _KEYS if given.get(key) is not None}
        content = given.get("content")
        if self.tokenizer.takes_parts and isinstance(content, list | tuple) and len(content) > 1:
            return None
        if plain.get("role") == "developer" and not self.tokenizer.takes_developers:
            return None
        plain["content"] = _text(content)
        if plain["content"] is None:
            return None
        if "reasoning" in plain:
            plain["reasoning_content"] = plain["reasoning"]
        calls = plain.pop("tool_calls", None)
        if calls:
            plain["tool_calls"] = [_call(_as_dict(call)) for call in calls]
        return plain


def _as_dict(value: Any) -> dict[str, Any]:
    plain: dict[str, Any] = dict(value) if isinstance(value, dict) else value.model_dump()
    return plain


def _text(content: Any) -> str | None:
    """Content as vLLM joins it; None if it holds more than text."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = [{"type": "text", "text": p} if isinstance(p, str) else p for p in content]
    if any(p.get("type", "text") != "text" or p.get("text") is None for p in parts):
        return None
    return "\n".join(p["text"] for p in parts if p["text"])


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            arguments = {}
    # As vLLM: what is no object counts as an empty one.
    function["arguments"] = arguments if isinstance(arguments, dict) else {}
    return {**call, "function": function}


# -- what is not tokenized --------------------------------------------------------------------


def bounded(body: Any) -> TokenizedPrompt:
    """A prompt that is not tokenized: at most a token for each byte of it, and so many for each
    image, sound and video."""
    if not isinstance(body, ChatCompletionRequest):
        return TokenizedPrompt(None, max(_prompt_tokens(body.prompt), 1))
    shown = [[tool.model_dump() for tool in body.tools or ()], body.documents]
    messages = sum(_message_tokens(_as_dict(message)) for message in body.messages)
    return TokenizedPrompt(None, messages + _bytes_in(shown))


def _prompt_tokens(prompt: Any) -> int:
    if not isinstance(prompt, list):
        return _bytes_in(prompt)
    ids = bool(prompt) and isinstance(prompt[0], int)
    return len(prompt) if ids else sum(map(_prompt_tokens, prompt))


def _message_tokens(message: Mapping[str, Any]) -> int:
    content = message.get("content")
    parts = content if isinstance(content, list | tuple) else [content]
    each = (_MEDIA_TOKENS if _is_media(part) else _bytes_in(part) for part in parts)
    around = _bytes_in({key: value for key, value in message.items() if key != "content"})
    return _MESSAGE_TOKENS + around + sum(each)


def _is_media(part: Any) -> bool:
    return isinstance(part, Mapping) and str(part.get("type")).endswith(("_url", "_audio"))


def _bytes_in(value: Any) -> int:
    """UTF-8 bytes of all that a JSON value shows."""
    if isinstance(value, str):
        return len(value.encode(errors="replace"))
    if isinstance(value, Mapping):
        return sum(_bytes_in(key) + _bytes_in(one) for key, one in value.items())
    if isinstance(value, list | tuple):
        return sum(map(_bytes_in, value))
    return 0 if value is None else len(str(value))

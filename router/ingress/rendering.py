"""From a request's body to the token ids that the engine will compute, once, at the ingress.

Uses the model's own tokenizer and chat template through `transformers`, as the engine does. What it
cannot render for sure (images, several prompts) it does not guess: routing then fails open. Slow
work: call it off the event loop.
"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
from transformers import AutoTokenizer

# A template that looks into a list of content parts gets the list from vLLM, any other one string.
_LOOKS_INTO_PARTS = re.compile(r"\bfor\s+\w+\s+in\s+[^%]*content")
# What vLLM passes on of a message; a template sees nothing else.
_KEYS = ("role", "content", "name", "tool_call_id", "tool_calls", "reasoning", "task")


class PromptRenderer:
    """Renders and tokenizes for one model."""

    def __init__(self, source: str, chat_template: str | None = None) -> None:
        """Load the tokenizer of `source` (folder or Hugging Face name)."""
        self._tokenizer: Any = AutoTokenizer.from_pretrained(source)
        self._template = chat_template
        template = str(chat_template or self._tokenizer.chat_template or "")
        self._takes_parts = bool(_LOOKS_INTO_PARTS.search(template))
        self._takes_developers = "developer" in template

    def render(self, body: Any) -> np.ndarray | None:
        """Token ids of a chat or completion body; None where they are not certain."""
        ids = self._chat(body) if hasattr(body, "messages") else self._completion(body)
        return None if ids is None else np.asarray(ids, dtype=np.int64)

    def _completion(self, body: Any) -> list[int] | None:
        prompt = body.prompt
        if isinstance(prompt, str):
            add = bool(getattr(body, "add_special_tokens", True))
            ids: list[int] = self._tokenizer(prompt, add_special_tokens=add)["input_ids"]
            return ids
        if isinstance(prompt, list) and prompt and all(isinstance(i, int) for i in prompt):
            return prompt
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list):
            return prompt[0]
        return None

    def _chat(self, body: Any) -> list[int] | None:
        if getattr(body, "truncate_prompt_tokens", None) is not None:
            return None
        messages = [self._plain(message) for message in body.messages]
        if any(message is None for message in messages):
            return None
        tools = [tool.model_dump() for tool in body.tools] if getattr(body, "tools", None) else None
        extra = dict(getattr(body, "chat_template_kwargs", None) or {})
        effort = getattr(body, "reasoning_effort", None)
        if effort is not None:
            extra = {"enable_thinking": effort != "none", **extra, "reasoning_effort": effort}
        text = self._tokenizer.apply_chat_template(
            messages,
            tools=tools,
            documents=getattr(body, "documents", None),
            chat_template=getattr(body, "chat_template", None) or self._template,
            add_generation_prompt=getattr(body, "add_generation_prompt", True),
            continue_final_message=getattr(body, "continue_final_message", False),
            tokenize=False,
            **extra,
        )
        add = bool(getattr(body, "add_special_tokens", False))
        ids: list[int] = self._tokenizer(text, add_special_tokens=add)["input_ids"]
        return ids

    def _plain(self, message: Any) -> dict[str, Any] | None:
        """A message as the template sees it: content as a string, arguments as objects."""
        given = dict(message) if isinstance(message, dict) else message.model_dump()
        plain = {key: given[key] for key in _KEYS if given.get(key) is not None}
        content = given.get("content")
        if self._takes_parts and isinstance(content, list | tuple) and len(content) > 1:
            return None
        if plain.get("role") == "developer" and not self._takes_developers:
            return None
        plain["content"] = _text(content)
        if plain["content"] is None:
            return None
        if "reasoning" in plain:
            plain["reasoning_content"] = plain["reasoning"]
        calls = plain.pop("tool_calls", None)
        if calls:
            plain["tool_calls"] = [_call(call) for call in calls]
        return plain


def _text(content: Any) -> str | None:
    """Content as vLLM joins it; None if it holds more than text."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = [{"type": "text", "text": p} if isinstance(p, str) else p for p in content]
    if any(p.get("type", "text") != "text" or p.get("text") is None for p in parts):
        return None
    return "\n".join(p["text"] for p in parts if p["text"])


def _call(call: Any) -> dict[str, Any]:
    call = dict(call) if isinstance(call, dict) else call.model_dump()
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

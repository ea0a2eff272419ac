"""From a request's body to the token ids that the engine will compute, once, at the ingress.

Uses the model's own tokenizer and chat template through `transformers`, as the engine does. What it
cannot render for sure (images, several prompts) it does not guess: routing then fails open. Slow
work: call it off the event loop.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from transformers import AutoTokenizer


class PromptRenderer:
    """Renders and tokenizes for one model."""

    def __init__(self, source: str, chat_template: str | None = None) -> None:
        """Load the tokenizer of `source` (folder or Hugging Face name)."""
        self._tokenizer: Any = AutoTokenizer.from_pretrained(source)
        self._template = chat_template

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
        messages = [_plain(message) for message in body.messages]
        if any(message is None for message in messages):
            return None
        tools = [tool.model_dump() for tool in body.tools] if getattr(body, "tools", None) else None
        extra = dict(getattr(body, "chat_template_kwargs", None) or {})
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


def _plain(message: Any) -> dict[str, Any] | None:
    """A message as the template sees it: text content as a string, arguments as objects."""
    plain = dict(message) if isinstance(message, dict) else message.model_dump(exclude_none=True)
    content = plain.get("content")
    if content is not None and not isinstance(content, str):
        parts = list(content)
        texts = [part if isinstance(part, str) else part.get("text") for part in parts]
        kinds = {part.get("type", "text") for part in parts if not isinstance(part, str)}
        if kinds - {"text"} or any(text is None for text in texts):
            return None
        plain["content"] = "\n".join(texts)
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_call(call) for call in plain["tool_calls"]]
    return plain


def _call(call: Any) -> dict[str, Any]:
    call = dict(call) if isinstance(call, dict) else call.model_dump()
    function = dict(call.get("function") or {})
    if isinstance(function.get("arguments"), str):
        function["arguments"] = json.loads(function["arguments"] or "{}")
    return {**call, "function": function}

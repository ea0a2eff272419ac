"""The body of a request as decisions, prompts and engines read it, whichever API it came by. Pure.

What its field lists kept (`kappa_router.api.fields`) is taken as it is. What else may be wrong with
it an engine's schema says, at the worker: none stands here, since to import vLLM's takes ten
seconds and 400 MB.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from kappa_router.api.checks import need

Json = dict[str, Any]

# What vLLM takes where a completion does not say.
_COMPLETION_TOKENS = 16


@dataclass(slots=True, eq=False)
class RequestBody:
    """A chat, or else a completion, as far as it goes on to an engine."""

    is_chat: bool
    # Those that checks kept, none of them null, by vLLM's names; shared, never changed.
    fields: Mapping[str, Any]
    # At first as the client asked, then as the router has it.
    cache_salt: str | None = None
    priority: int | None = None
    # The router's own, as `vllm_xargs`.
    kv_transfer_params: Json | None = None
    vllm_xargs: dict[str, Any] | None = None

    @classmethod
    def chat(cls, kept: Mapping[str, Any]) -> RequestBody:
        """A chat, of the fields that checks kept; ApiError 400 without messages."""
        return cls._of(kept, "messages")

    @classmethod
    def completion(cls, kept: Mapping[str, Any]) -> RequestBody:
        """A completion, of the fields that checks kept; ApiError 400 without a prompt."""
        return cls._of(kept, "prompt")

    @classmethod
    def _of(cls, kept: Mapping[str, Any], needed: str) -> RequestBody:
        need(kept, needed)
        return cls(needed == "messages", kept, kept.get("cache_salt"), kept.get("priority"))

    @property
    def model(self) -> str | None:
        return self.fields.get("model")

    @property
    def messages(self) -> list[Json]:
        """A chat's; of a completion none."""
        return self.fields["messages"] if self.is_chat else []

    @property
    def prompts(self) -> list[Any]:
        """A completion's, as `prompts_in`; a chat has none."""
        return [] if self.is_chat else prompts_in(self.fields)

    @property
    def stream(self) -> bool:
        return bool(self.fields.get("stream"))

    @property
    def max_tokens(self) -> int:
        """The bound on generated tokens, 0 if there is none but the context."""
        given = self.fields.get("max_tokens", 0 if self.is_chat else _COMPLETION_TOKENS)
        return int(self.fields.get("max_completion_tokens") or given)

    @property
    def answers(self) -> int:
        """As `choices_in`."""
        return choices_in(self.fields)

    @property
    def reads_cache(self) -> bool:
        """Whether a cached prefix serves it: vLLM computes a prompt whole if its logprobs are
        wanted, by a chat also as its number of top logprobs, which is 0 by default."""
        fields = self.fields
        echoed = fields.get("top_logprobs", 0) if self.is_chat else fields.get("logprobs")
        return fields.get("prompt_logprobs") is None and (not fields.get("echo") or echoed is None)

    def sets(self) -> Json:
        """The fields that the router puts into it."""
        own = {
            "cache_salt": self.cache_salt, "priority": self.priority or None,
            "kv_transfer_params": self.kv_transfer_params, "vllm_xargs": self.vllm_xargs,
        }  # fmt: skip
        return {name: value for name, value in own.items() if value is not None}

    def json(self) -> bytes:
        """It whole, as its engine's HTTP API takes it."""
        return msgspec.json.encode({**self.fields, **self.sets()})


def prompts_in(body: Mapping[str, Any]) -> list[Any]:
    """A completion's prompts, texts or lists of token ids; empty where its prompt is."""
    prompt = body.get("prompt")
    # A list of numbers is one prompt, in tokens.
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return prompt
    return [prompt] if prompt else []


def choices_in(body: Mapping[str, Any]) -> int:
    """The number of answers that a body asks for: `n` for every prompt."""
    return int(body.get("n") or 1) * max(len(prompts_in(body)), 1)

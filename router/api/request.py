"""One chat or completion on its way: whose it is, what it asks for, and what it is held to."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ray.serve.llm.openai_api_models import ChatCompletionRequest
from starlette.datastructures import Headers
from starlette.requests import Request

from router.api.app import Inbound, inbound_of
from router.api.auth import Tenant
from router.api.constraints import (
    APPROX_HEADER,
    DEADLINE_HEADER,
    Deadline,
    approx_allowed,
    cache_salt,
    deadline_of,
)
from router.api.fields import choices_in
from router.api.metadata import PLAN_HEADER
from router.api.render import TokenizedPrompt
from router.index.prefix_hash import salt_of
from router.live.suspects import content_digest
from router.telemetry import RequestTimeline

SESSION_HEADER = "x-session-id"

_CONVERSATION_KEYS = ("prompt_cache_key", "user")
_CLOCK_SLACK_S = 0.005
_GIVEN_UP = ("client_gone", "deadline")


@dataclass(slots=True, eq=False)
class ApiRequest:
    """A request from its accepted body to the end of its answer.

    request_id: its id here, unlike that of any other that is open; method: Ray's name of its kind,
    `chat` or `completions`; body: Ray's schema of it; prompt: None until it is tokenized or
    bounded; on_end: called once with the end and the status, when the request is over.
    """

    request_id: str
    method: str
    body: Any
    headers: Headers
    inbound: Inbound
    timeline: RequestTimeline
    on_end: Callable[[ApiRequest, str, int], None] | None = None
    deadline: Deadline | None = None
    prompt: TokenizedPrompt | None = None

    @classmethod
    def of(cls, http: Request, body: Any, method: str) -> ApiRequest:
        """An HTTP request as it arrived; `prepare` it before anything is decided."""
        inbound = inbound_of(http)
        timeline = RequestTimeline(inbound.request_id, inbound.tenant.name, time.time())
        return cls(inbound.request_id, method, body, http.headers, inbound, timeline)

    def prepare(self) -> None:
        """Read its deadline, and make its body's `cache_salt` its tenant's own, for engine and
        router alike.

        Raises:
            ApiError: 400, its deadline is none.
        """
        salt = cache_salt(self.tenant, self.body.cache_salt)
        if salt is not None:
            self.body.cache_salt = salt
        header = self.headers.get(DEADLINE_HEADER, "")
        self.deadline = deadline_of(header, self.inbound.arrived_s)

    def finish(self, end: str, status: int) -> None:
        """It is over; only the first call counts."""
        on_end, self.on_end = self.on_end, None
        if on_end is not None:
            on_end(self, end, status)

    # -- what it asks for ---------------------------------------------------------------------

    @property
    def tenant(self) -> Tenant:
        return self.inbound.tenant

    @property
    def streamed(self) -> bool:
        """Whether its answer has begun with its first token."""
        return bool(self.body.stream)

    @property
    def max_tokens(self) -> int:
        """The client's bound on generated tokens, 0 if it gave none."""
        fields = vars(self.body)
        return int(fields.get("max_completion_tokens") or fields.get("max_tokens") or 0)

    @property
    def salt(self) -> int:
        """What sets its cached prefixes apart: its tenant, or that it finds none at all."""
        if self._reads_no_cache:
            return salt_of(f"{self.request_id} finds no prefix")
        return salt_of(self.body.cache_salt)

    @property
    def _reads_no_cache(self) -> bool:
        """Whether vLLM computes all of its prompt, since it is asked for the prompt's logprobs."""
        body = self.body
        if body.prompt_logprobs is not None or not body.echo:
            return body.prompt_logprobs is not None
        is_chat = isinstance(body, ChatCompletionRequest)
        return (body.top_logprobs if is_chat else body.logprobs) is not None

    @property
    def conversation(self) -> str:
        """What the client calls the conversation that it belongs to; else its id.

        A header `x-session-id`, else OpenAI's `prompt_cache_key` or `user`.
        """
        named = [self.headers.get(SESSION_HEADER)]
        named += [getattr(self.body, key, None) for key in _CONVERSATION_KEYS]
        return str(next(filter(None, named), self.request_id))

    @property
    def load_plan(self) -> str:
        """The load plan that its client asks for; empty without one."""
        return self.headers.get(PLAN_HEADER, "").strip()

    @property
    def approx(self) -> bool | None:
        """Whether its client takes an approximate answer; ApiError 400 if that cannot be read."""
        fields = self.body.model_extra or {}
        return approx_allowed(self.headers.get(APPROX_HEADER), fields.get("approx"))

    @property
    def digest(self) -> str:
        """A name of its content, by the body as it came."""
        return content_digest(self.tenant.name, self.method, self.inbound.body)

    # -- what it is held to -------------------------------------------------------------------

    def tokenized(self, prompt: TokenizedPrompt) -> None:
        """Take the length of its prompts, known or bounded, and that of all its answers from its
        tenant's tokens.

        Raises:
            ApiError: its tenant has no tokens left, or its deadline has passed.
        """
        self.prompt, now_s = prompt, time.monotonic()
        if self.deadline is not None:
            self.deadline.check(now_s)
        if self.inbound.lease is not None:
            generated = choices_in(vars(self.body)) * self.max_tokens
            self.inbound.lease.reserve(prompt.tokens, generated, now_s)

    def patience_s(self, longest_s: float) -> float:
        """Seconds to wait for its first item: no longer than `longest_s`, nor past its deadline.

        Raises:
            ApiError: 504, it has passed.
        """
        if self.deadline is None:
            return longest_s
        now_s = time.monotonic()
        self.deadline.check(now_s)
        return min(longest_s, self.deadline.at_s - now_s)

    @property
    def expired(self) -> bool:
        """Whether its deadline has passed."""
        # A timer may fire a moment before the clock that it was set by says so.
        now_s = time.monotonic() + _CLOCK_SLACK_S
        return self.deadline is not None and now_s >= self.deadline.at_s

    def check_deadline(self) -> None:
        """Raises ApiError 504 if its deadline has passed."""
        if self.deadline is not None and self.expired:
            self.deadline.check(self.deadline.at_s)

    def attempt_over(self, end: str) -> None:
        """An attempt to serve it ended so; what was computed for a client that would not wait, it
        pays for."""
        if self.inbound.lease is not None and end in _GIVEN_UP:
            self.inbound.lease.worked = True

    def generated(self, tokens: int) -> None:
        """Output tokens go out to the client."""
        if self.inbound.lease is not None:
            self.inbound.lease.generated(tokens)

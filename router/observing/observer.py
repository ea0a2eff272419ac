"""Who is told of each request's stations on its way through the ingress; by default nobody.

The path of a request calls these as they happen, on the event loop: an observer returns at once and
raises nothing. Spans, logs and the like are observers; routing never depends on one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from router.decision import Decision


class RequestObserver(Protocol):
    """The stations; `now_s` is seconds since the epoch, `request_id` the same at all of them.

    A request that is tried again elsewhere is decided and sent twice. `ended` is called exactly
    once for each `received`.
    """

    def received(
        self, request_id: str, tenant: str, headers: Mapping[str, str], now_s: float
    ) -> None:
        """Its body was accepted; `headers` in lower case, without keys."""

    def tokenized(self, request_id: str, prompt_tokens: int | None, now_s: float) -> None:
        """Its prompt was rendered; None if it could not be."""

    def decided(self, request_id: str, decision: Decision, attempt: int, now_s: float) -> None:
        """A worker was chosen and reserved; attempts count from 0."""

    def sent(self, request_id: str, worker: str, now_s: float) -> None:
        """It was handed to Ray Serve for that worker."""

    def first_token(self, request_id: str, now_s: float) -> None:
        """Its first item came back from the worker."""

    def ended(self, request_id: str, end: str, status: int, now_s: float) -> None:
        """It is over: `done`, `error`, `client_gone`, `worker_died`, or the code of the refusal.

        status: what the client was answered; 0 if it left before.
        """


class NoObserver:
    """Looks away."""

    def received(
        self, request_id: str, tenant: str, headers: Mapping[str, str], now_s: float
    ) -> None:
        """Nothing."""

    def tokenized(self, request_id: str, prompt_tokens: int | None, now_s: float) -> None:
        """Nothing."""

    def decided(self, request_id: str, decision: Decision, attempt: int, now_s: float) -> None:
        """Nothing."""

    def sent(self, request_id: str, worker: str, now_s: float) -> None:
        """Nothing."""

    def first_token(self, request_id: str, now_s: float) -> None:
        """Nothing."""

    def ended(self, request_id: str, end: str, status: int, now_s: float) -> None:
        """Nothing."""

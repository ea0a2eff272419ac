"""A tally of each request: its tenant, and the tokens that engines generate for it, counted where
they arise. Events of a stream do not say how many tokens they hold: vLLM merges those that its
front end does not take in time. The request's task begins a tally, and every task that it starts
sees it."""

from __future__ import annotations

from contextvars import ContextVar


class Tally:
    """Tokens of all answers of one request. tenant: "" where it is not known."""

    __slots__ = ("tenant", "tokens")

    def __init__(self, tenant: str = "") -> None:
        self.tenant, self.tokens = tenant, 0


_tally: ContextVar[Tally | None] = ContextVar("kappa_generated", default=None)


def begin(tenant: str = "") -> Tally:
    """Count for the request of the running task from now on."""
    tally = Tally(tenant)
    _tally.set(tally)
    return tally


def current() -> Tally | None:
    """The tally that is being kept here; None: the request is not a client's."""
    return _tally.get()

"""What a failed delivery says: of its worker, of whether another should try, and to the client.

Ray, vLLM and our own replicas tell of trouble in many ways: exceptions of an actor that died, of an
engine that died under it, error objects in place of an answer, and error events inside a stream.
All become a `WorkerFailed` here, or an `ApiError` where the client itself is to blame.
"""

from __future__ import annotations

import json
from typing import Any

import structlog
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError

from kappa.protocol import ERROR_EVENT, EngineDiedError
from router.api.errors import (
    ApiError,
    engine_failed,
    engine_lost,
    from_engine,
    grammar_failed,
    killed_an_engine,
)
from router.api.request import ApiRequest
from router.live.live_router import LiveRouter
from router.live.membership import DIED, ENGINE_DIED
from router.live.replica_registry import PinGoneError
from router.live.waiting import WorkerLostError

log = structlog.get_logger(__name__)

# vLLM's and our own engines' names of a dead engine, where their classes do not travel.
_DEAD_ENGINES = frozenset(("EngineDeadError", "EngineDiedError", "EngineStopped"))
# vLLM's error of a request that ended in its scheduler. There are two reasons: a load that failed,
# after which our connectors compute the prompt instead, and a grammar that does not compile.
_ENDED_BY_SCHEDULER = "Internal server error"
_CONSTRAINTS = ("structured_outputs", "response_format", "tools")


class WorkerFailed(Exception):
    """A worker did not serve a request. end: how it ended there (`LiveRouter.release`); why: one
    word; error: what the client is told if nobody else can serve it, None: that nobody can."""

    def __init__(self, end: str, why: str, error: ApiError | None = None) -> None:
        super().__init__(why)
        self.end, self.why, self.error = end, why, error


def worker_failed(error: Exception) -> WorkerFailed:
    """What an exception out of Ray's delivery means."""
    if isinstance(error, WorkerFailed):
        return error
    if isinstance(error, WorkerLostError):
        return WorkerFailed("worker_died", str(error))
    if isinstance(error, EngineDiedError) or _names(error) & _DEAD_ENGINES:
        return WorkerFailed("worker_died", ENGINE_DIED)
    if isinstance(error, RayActorError):
        return WorkerFailed("worker_died", DIED)
    if isinstance(error, PinGoneError):
        return WorkerFailed("worker_full", "left")
    if isinstance(error, BackPressureError):
        return WorkerFailed("worker_full", "full")
    return WorkerFailed("error", "error", engine_failed())


def _names(error: BaseException) -> set[str]:
    """Of the classes of an exception and of what Ray says caused it."""
    cause = getattr(error, "cause", None)
    return {type(e).__name__ for e in (error, cause) if e is not None}


# -- requests that kill engines ---------------------------------------------------------------


def refuse_killer(live: LiveRouter, request: ApiRequest) -> None:
    """Raises ApiError 422 if engines died of that content."""
    if live.suspects and live.suspects.refused(request.digest, live.now_s()):
        raise killed_an_engine()


def may_pass_on(live: LiveRouter, request: ApiRequest, worker: str) -> None:
    """A request was lost with a worker before its first token: may another have it?

    Raises:
        ApiError: 503, it was alone in an engine that died; 422, it was in two.
    """
    verdict = live.suspects.blame(worker, request.digest, live.now_s())
    if verdict == "retry":
        return
    log.error(
        "request_killed_engine", request_id=request.request_id, tenant=request.tenant.name,
        worker=worker, verdict=verdict,
    )  # fmt: skip
    if verdict == "killer":
        raise killed_an_engine()
    raise engine_lost(request.request_id, live.retry_after_s())


# -- errors in place of an answer, or inside one ----------------------------------------------


def raise_error_item(item: Any, body: Any = None) -> None:
    """Raise if what came first is an error instead of the answer to a request with that body.

    Raises:
        ApiError: the engine refused the request, or could not compile its grammar: so would others.
        WorkerFailed: the engine failed.
    """
    error = error_in(item) if isinstance(item, str) else None
    if error is None and hasattr(item, "error"):
        error = from_engine(item)
    if error is None:
        return
    if error.status < 500:
        raise error
    if _ENDED_BY_SCHEDULER in (item if isinstance(item, str) else error.message):
        _raise_if_constrained(body)
    raise WorkerFailed("error", "error", engine_failed())


def raise_refused(error: Exception, body: Any) -> None:
    """Raises ApiError 400 if an exception out of Ray's delivery is about the request's grammar."""
    if "GenerationError" in _names(error):
        _raise_if_constrained(body)


def _raise_if_constrained(body: Any) -> None:
    """Raises ApiError 400 if a schema, an expression or a grammar constrains the answer."""
    if any(getattr(body, name, None) for name in _CONSTRAINTS):
        raise grammar_failed() from None


def error_in(packet: str) -> ApiError | None:
    """The error that a piece of a stream tells of, if it does; details of a failure stay here."""
    at = packet.find(ERROR_EVENT)
    if at < 0:
        return None
    line = packet[at:].split("\n", 1)[0].removeprefix("data: ")
    try:
        info = json.loads(line)["error"]
        status = int(info.get("code") or 500)
    except (ValueError, TypeError, AttributeError, KeyError):
        return engine_failed()
    if status >= 500:
        return engine_failed()
    return ApiError(status, str(info.get("message", "")), param=info.get("param"))

"""One chat or completion on its way: its tenant, what it asks for, and its bounds.

What can never be served is refused before it is queued: a scheduler that packs by VRAM promises
that every request is served only for those that fit.
"""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from starlette.requests import Request

from kappa.protocol import APPROX_HEADER, Announcement
from kappa.settings.routing import RouterSettings
from kappa_router.api import errors
from kappa_router.api.checks import digits
from kappa_router.api.metadata import (
    CONVERSATION_KEYS,
    DEADLINE_HEADER,
    OBJECTIVE_HEADER,
    PLAN_HEADER,
    SESSION_HEADER,
    SLO_TTFT_HEADER,
)
from kappa_router.api.request_body import RequestBody
from kappa_router.api.tenants import Lease, Tenant
from kappa_router.decision import Estimates
from kappa_router.index.prefix_hash import salt_of
from kappa_router.telemetry import RequestTimeline

_LONGEST_DEADLINE_MS = 24 * 3600 * 1000
_CLOCK_SLACK_S = 0.005
_APPROX_VALUES = {"ok": math.inf, "no": 0.0, "": None}


@dataclass(slots=True)
class Inbound:
    """A request as the middleware knows it, before its endpoint sees it."""

    request_id: str
    # By the monotonic clock.
    arrived_s: float
    tenant: Tenant = field(default_factory=Tenant)
    # What it holds of its tenant's limits; None where they do not count it.
    lease: Lease | None = None
    body: bytes = b""


def inbound_of(request: Request) -> Inbound:
    """The request as the middleware knows it."""
    inbound: Inbound = request.scope["state"]["inbound"]
    return inbound


@dataclass(frozen=True, slots=True)
class EndpointModel:
    """A model behind the endpoint."""

    name: str
    # Folder or Hugging Face name.
    tokenizer_source: str
    # Their names.
    adapters: tuple[str, ...] = ()


def model_of(models: Sequence[EndpointModel], name: str | None) -> tuple[EndpointModel, str | None]:
    """The model that a request asks for by its name or by an adapter's, and that adapter; raises
    ApiError 404 if there is none, 400 if it names none and there are several."""
    if name is None and len(models) == 1:
        return models[0], None
    names = ", ".join(each for model in models for each in (model.name, *model.adapters))
    if name is None:
        raise errors.bad_field("model", f"name one of {names}")
    for model in models:
        if name == model.name or name in model.adapters:
            return model, None if name == model.name else name
    raise errors.UNKNOWN_MODEL(model=str(name), served=names)


@dataclass(slots=True, eq=False)
class ApiRequest:
    """A request from its accepted body to the end of its answer."""

    # Unlike that of any other that is open.
    request_id: str
    body: RequestBody
    # By names in lower case.
    headers: Mapping[str, str]
    tenant: Tenant
    # By the monotonic clock.
    arrived_s: float
    # Of its body as its client sent it.
    body_bytes: int
    # Names its content.
    digest: str = ""
    # Where its time goes.
    timeline: RequestTimeline = field(init=False)
    # When its answer must have begun; None: at any time.
    deadline: Deadline | None = None
    # Real seconds to its first token that it asks for; 0: it does not.
    ttft_limit_s: float = 0.0
    # It asks for this model, by an adapter's name if there is one.
    model: EndpointModel = field(init=False)
    adapter: str | None = None

    @classmethod
    def of(cls, http: Request, body: RequestBody) -> ApiRequest:
        """An HTTP request as it arrived; `prepare` it before anything is decided."""
        inbound = inbound_of(http)
        return cls(
            inbound.request_id, body, http.headers, inbound.tenant, inbound.arrived_s,
            len(inbound.body),
        )  # fmt: skip

    def prepare(self, models: Sequence[EndpointModel], rules: RouterSettings) -> None:
        """Find its model, read its deadline, and make its body's `cache_salt` its tenant's own, for
        engine and router alike; give it its class of priority and its objective. Raises ApiError
        404 if there is no such model, 400 if its deadline or objective is none, or its class not
        its tenant's to ask for."""
        self.model, self.adapter = model_of(models, self.body.model)
        salt = cache_salt(self.tenant, self.body.cache_salt)
        if salt is not None:
            self.body.cache_salt = salt
        self.body.priority, self.ttft_limit_s = objective_of(
            self.headers, rules, self.tenant, self.body.priority
        )
        self.deadline = deadline_of(self.headers.get(DEADLINE_HEADER, ""), self.arrived_s)

    # -- what it asks for ---------------------------------------------------------------------

    @property
    def salt(self) -> int:
        """Sets its cached prefixes apart, by tenant and adapter; finds none at all where vLLM
        computes the prompt whole, since its logprobs are wanted."""
        body = self.body
        own = body.cache_salt if body.reads_cache else f"{self.request_id} finds no prefix"
        return salt_of(own, self.adapter)

    @property
    def conversation(self) -> str:
        """The client's name for its conversation: a header `x-session-id`, else OpenAI's
        `prompt_cache_key` or `user`; else its id."""
        named = [self.headers.get(SESSION_HEADER)]
        named += [self.body.fields.get(key) for key in CONVERSATION_KEYS]
        return str(next(filter(None, named), self.request_id))

    @property
    def load_plan(self) -> str:
        """The load plan that its client asks for; empty without one."""
        return self.headers.get(PLAN_HEADER, "").strip()

    @property
    def approx(self) -> float | None:
        """As `approx_allowed`."""
        return approx_allowed(self.headers.get(APPROX_HEADER), self.body.fields.get("approx"))

    # -- what it is held to -------------------------------------------------------------------

    def patience_s(self, longest_s: float) -> float:
        """Seconds to wait for its first item: no longer than `longest_s`, nor past its deadline;
        raises ApiError 504 if that has passed."""
        if self.deadline is None:
            return longest_s
        now_s = time.monotonic()
        self.deadline.check(now_s)
        return min(longest_s, self.deadline.at_s - now_s)

    @property
    def expired(self) -> bool:
        # A timer may fire a moment before the clock that it was set by says so.
        now_s = time.monotonic() + _CLOCK_SLACK_S
        return self.deadline is not None and now_s >= self.deadline.at_s


def cache_salt(tenant: Tenant, own: str | None) -> str | None:
    """The salt of a request of `tenant` that asked for the salt `own`; None: there is none.

    An engine that reuses another tenant's prefix answers sooner, which betrays what the other sent.
    So the tenant's name goes into the salt of every prefix hash, the engine's and the router's
    alike; a client's own salt divides its tenant's cache further and can never leave it. The salt
    is the same at every start, for caches that outlive one; to know it gains nothing, since each
    client's own text is hashed in.
    """
    if not tenant.own_cache:
        return own or None
    name, given = tenant.name.encode(), (own or "").encode(errors="surrogatepass")
    # The length keeps apart tenant and salt, wherever one ends and the other begins.
    data = len(name).to_bytes(4, "little") + name + given
    return hashlib.blake2b(data, digest_size=16, person=b"kappa-tenant").hexdigest()


# -- objectives and deadlines -----------------------------------------------------------------


def objective_of(
    headers: Mapping[str, str], rules: RouterSettings, tenant: Tenant, requested: int | None = None
) -> tuple[int, float]:
    """The class of a request, and the real seconds to its first token that it asks for, 0 for none,
    by the class that its body names and by the headers of its objective.

    The body's own class, and the milliseconds of `x-slo-ttft-ms`, go before those of a named
    objective. Raises ApiError 400 for an objective that `rules` does not list, a class that is not
    the tenant's to ask for, and milliseconds that are no number above 0 and up to the bound.
    """
    where, named = "priority", headers.get(OBJECTIVE_HEADER, "").strip()
    ttft_s = 0.0
    if named and rules.objectives:
        if named not in rules.objectives:
            raise errors.bad_field(OBJECTIVE_HEADER, f"name one of {', '.join(rules.objectives)}")
        objective = rules.objectives[named]
        ttft_s = objective.ttft_s or 0.0
        if requested is None:
            where, requested = OBJECTIVE_HEADER, objective.priority
    own = headers.get(SLO_TTFT_HEADER, "").strip()
    if own and rules.longest_ttft_s:
        most_ms = 1000 * rules.longest_ttft_s
        if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,6})?", own) or not 0 < float(own) <= most_ms:
            why = f"give milliseconds above 0 and up to {most_ms:g} (router.longest_ttft_s)"
            raise errors.bad_field(SLO_TTFT_HEADER, why)
        ttft_s = float(own) / 1000
    return tenant.class_of(requested, where), ttft_s


@dataclass(frozen=True, slots=True)
class Deadline:
    """The time by which an answer must have begun: a streamed one its first token, another whole.

    A request that is predicted to miss it is refused at once; one that has missed it while it
    waited, here or in an engine's queue, is dropped.
    """

    arrived_s: float
    allowed_s: float

    @property
    def at_s(self) -> float:
        return self.arrived_s + self.allowed_s

    def check(self, now_s: float) -> None:
        """Raises ApiError 504 once it has passed."""
        if now_s >= self.at_s:
            raise errors.DEADLINE_PASSED(allowed_s=self.allowed_s)


def deadline_of(header: str, arrived_s: float) -> Deadline | None:
    """The deadline that a request's header asks for; None without one; ApiError 400 if it is no
    whole number of milliseconds above 0, or more than a day."""
    if not header.strip():
        return None
    millis = digits(header.strip(), 11)
    if millis is None or not 1 <= millis <= _LONGEST_DEADLINE_MS:
        raise errors.bad_field(
            DEADLINE_HEADER, f"give whole milliseconds from 1 to {_LONGEST_DEADLINE_MS}"
        )
    return Deadline(arrived_s, millis / 1000)


def late_workers(
    deadline: Deadline, estimates: Estimates, now_s: float, *, streamed: bool
) -> frozenset[str]:
    """The workers that would answer too late; raises ApiError 429 if that is all of them.

    An answer that is not streamed is there with its last token: as many as are expected, at the
    worker's predicted TPOT.
    """
    needed_s = estimates.ttft_s
    if not streamed:
        needed_s = needed_s + estimates.expected_output_tokens * estimates.tpot_s
    late = needed_s > deadline.at_s - now_s
    if late.all():
        soonest_s = float(needed_s.min())
        late_s = now_s + soonest_s - deadline.at_s
        raise errors.DEADLINE_UNMEETABLE(
            needed_s=soonest_s, late_s=late_s, allowed_s=deadline.allowed_s, retry_after_s=late_s
        )
    return frozenset(estimates.workers[i] for i in np.flatnonzero(late))


# -- workers that can serve it ----------------------------------------------------------------


def unfit_workers(
    workers: Collection[Announcement], prompt_tokens: int, max_tokens: int
) -> frozenset[str]:
    """Workers that could never hold the prompt and `max_tokens` more (at least one); raises
    ApiError 400 if that is all of them."""
    generated = max(max_tokens, 1)
    needed = prompt_tokens + generated

    def blocks(worker: Announcement) -> int:
        return -(-needed // worker.block_tokens)

    def usable_blocks(worker: Announcement) -> int:
        if str(worker.load_plan.get("planner", "")).startswith("host-"):
            return max(worker.host_blocks, worker.device_blocks)
        return worker.device_blocks - 1  # vLLM keeps one block that it never gives away.

    unfit = frozenset(
        one.worker
        for one in workers
        if needed > one.max_context_tokens or blocks(one) > usable_blocks(one)
    )
    if not workers or len(unfit) < len(workers):
        return unfit
    context = max(one.max_context_tokens for one in workers)
    if needed > context:
        output = f" and {max_tokens} to generate" if max_tokens > 0 else ""
        raise errors.CONTEXT_TOO_LONG(
            limit_tokens=context, needed=needed, parts=f"{prompt_tokens} in the prompt{output}"
        )
    largest = max(workers, key=lambda one: usable_blocks(one) * one.block_tokens)
    fault = errors.ANSWER_TOO_LARGE if max_tokens > 0 else errors.PROMPT_TOO_LARGE
    raise fault(
        blocks=blocks(largest), prompt_tokens=prompt_tokens, max_tokens=generated,
        device_blocks=usable_blocks(largest),
    )  # fmt: skip


def approx_allowed(header: str | None, field: object) -> float | None:
    """The most loss of perplexity that a client takes, as a share, by the header `x-kappa-approx`,
    else the body's "approx"; 0: none, infinite: any, None: it does not say. Raises ApiError 400 for
    anything but ok, no and a number above 0 and at most 1."""
    given = field if header is None else header
    value = "" if given is None else str(given).strip().lower()
    if value in _APPROX_VALUES:
        return _APPROX_VALUES[value]
    if not re.fullmatch(r"[01]?\.?[0-9]{1,6}", value) or not 0.0 < float(value) <= 1.0:
        raise errors.bad_field(
            APPROX_HEADER,
            "give 'ok' where the answer may be approximate, or 'no', or the most "
            "loss of perplexity, such as 0.05",
        )
    return float(value)


def is_approximate(worker: Announcement, most_loss: float | None) -> bool:
    """Whether this worker is to answer a request approximately. A loss that its configuration does
    not state counts as any."""
    policy = worker.load_plan.get("approx", "never")
    if most_loss is None:
        return bool(policy == "always")
    loss = float(worker.load_plan.get("loss", math.inf))
    return policy != "never" and loss <= most_loss


def exact_workers(workers: Collection[Announcement], allowed: float | None) -> frozenset[str]:
    """Workers that a request which asks for an approximate answer is kept from, as exact or of more
    loss than it takes; raises ApiError 400 if that is all: rather than be answered exactly, at a
    cost that it did not ask for."""
    if not allowed:
        return frozenset()
    exact = frozenset(one.worker for one in workers if not is_approximate(one, allowed))
    if workers and len(exact) == len(workers):
        raise errors.NO_APPROXIMATION()
    return exact

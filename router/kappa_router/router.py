"""Decides where requests go: one of those workers that serve the request's model. Pure.

The decider feeds it what happens (a worker joins, blocks are stored, a first token comes; the
events of `router.pool`) and asks where a request goes; the simulator and the replay of a recorded
log do exactly the same. Each call takes the time. A request is priced on every worker that is
ready, a policy picks one, admission may refuse it, and its work is reserved there.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kappa_router import ttft
from kappa_router.admission import alone_s, delay_s, evaluate, limits, refuse
from kappa_router.config import RouterConfig
from kappa_router.decision import (
    NO_HASHES,
    Decision,
    Estimates,
    Held,
    NoWorkerError,
    PricedPrompt,
    RouteRequest,
    Slots,
)
from kappa_router.policy import LeastBacklog, least
from kappa_router.pool import ModelState, Pool, engine_job

_FAIL_OPEN = LeastBacklog()


class Router(Pool):
    """Decides where requests go, from what was reported to it."""

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        # Compiled now rather than while the first request waits.
        none = np.zeros((3, 0))
        ttft.leading_tokens(none.astype(np.int64), self.columns, self.columns, 0, 1, none)

    # -- decisions ----------------------------------------------------------------------------

    def route(
        self, request: RouteRequest, now_s: float, explained: Decision | None = None, to: str = ""
    ) -> Decision:
        """Choose a worker and reserve it.

        explained: what `explain` said of the request at this moment, so that it is not priced
        twice. to: the worker that another balancer chose instead.

        Raises:
            NoWorkerError: none is known, has reported recently, and is not excluded.
            OverloadedError: it would miss its objective (never for one that is tried again).
        """
        # Routed again under the same id: the earlier answer was not taken.
        if not self.release(request.request_id, now_s, complete=False):
            remote = self.flights.get(request.request_id)
            if remote is not None:
                self.finish(remote, now_s)
        decision = explained or self.explain(request, now_s)
        if to:
            at = decision.priced.workers.index(to)
            chosen = decision.priced.candidate(at)
            decision = replace(decision, chosen=chosen, index=at, fetch=None)
        if self.config.admission and request.sized and not request.retry:
            decision = self._admitted(request, decision, steered=bool(to))
        elif not to:
            decision = self.in_time(request, decision, now_s)
        return self._reserved(request, decision, now_s)

    def _reserved(self, request: RouteRequest, decision: Decision, now_s: float) -> Decision:
        estimates, index = decision.priced, decision.index
        flight = self.reserve(decision.request_id, estimates, index)
        flight.own, flight.sent_s, flight.max_tokens = True, now_s, request.max_tokens
        flight.chosen, flight.informed = decision.chosen, decision.informed
        self.reservations += 1
        if decision.informed:
            self.config.policy.routed(estimates, index, decision.request_id)
        if self.config.admission:
            row = estimates.row(index)
            flight.tpot_s = alone_s(row)
            flight.bounded_s = ttft.bounded_s(self.fleet.records, estimates.slots[index])
            self.lateness.sent(flight, now_s, delay_s(row))
        return decision

    def explain(self, request: RouteRequest, now_s: float) -> Decision:
        """The decision that `route` would make, without reserving, and without admission."""
        slots = self.fleet.ready(now_s, self.config.stale_after_s, request.exclude)
        model = self._model_of(request)
        if model is not None and len(self.models) > 1:
            slots = slots[self.numbers[slots] == model.number]
        if model is None or not len(slots):
            known = {name for name, state in self.workers.items() if state.model is model}
            excluded = len(known & request.exclude)
            of_it = f" of model {request.model}" if request.model else ""
            raise NoWorkerError(
                f"no worker{of_it} is ready ({len(known)} known, {excluded} excluded, "
                f"{len(known) - excluded} not heard from in the last "
                f"{self.config.stale_after_s:g} s)"
            )
        policy = self.config.policy if request.informed else _FAIL_OPEN
        estimates = self._estimate(request, slots, now_s)
        choice = policy.choose(estimates)
        if choice.fetch is not None and estimates.fetching is not None:
            estimates = estimates.fetching
        return Decision(
            request_id=request.request_id,
            chosen=estimates.candidate(choice.index),
            reason=choice.reason if request.informed else "uninformed_least_backlog",
            policy=policy.name,
            prompt_tokens=request.tokens if request.informed else 0,
            informed=request.informed,
            estimates=estimates,
            index=choice.index,
            fetch=choice.fetch,
        )

    def _model_of(self, request: RouteRequest) -> ModelState | None:
        """The model that a request asks for; None: no worker that serves it has joined, or the
        request names none where there are several."""
        if request.model or len(self.models) != 1:
            return self.models.get(request.model)
        return next(iter(self.models.values()))

    def in_time(self, request: RouteRequest, decision: Decision, now_s: float) -> Decision:
        """The decision, or one for workers that are predicted to keep the limit that the request
        asks for, if its own is not and there are any."""
        if not request.ttft_limit_s or not request.sized or request.retry:
            return decision
        estimates = decision.priced
        late = estimates.ttft_s > request.ttft_limit_s
        if not late[decision.index] or late.all():
            return decision
        names = frozenset(estimates.workers[i] for i in np.flatnonzero(late))
        return self.explain(replace(request, exclude=request.exclude | names), now_s)

    def _admitted(self, request: RouteRequest, decision: Decision, *, steered: bool) -> Decision:
        """The decision if its worker is expected to meet the objective, else one for those that
        are; steered: it is not ours to send elsewhere."""
        estimates = decision.priced
        now_s, demand = estimates.now_s, self.workers[decision.worker].model.demand
        idle = self.fleet.idle_s(estimates)
        standing = demand.standing(request, idle.least_work_s)
        limit = limits(self.fleet.objective, idle, demand.slack_share(standing))
        if request.ttft_limit_s:
            # Its slack stays the objective's: nobody has others refused by asking for little.
            usable_s = request.ttft_limit_s * limit.usable_ttft_s / limit.ttft_s
            limit = limit._replace(usable_ttft_s=usable_s)
        known = self.lateness, demand, limit
        at, found = decision.index, evaluate(self.fleet, estimates, decision.index, *known)
        # The others matter where the chosen one would be late.
        if found.rejected:
            rows = (at,) if steered else range(len(estimates))
            each = [evaluate(self.fleet, estimates, i, *known) for i in rows]
            if all(one.rejected for one in each):
                refuse(each, demand, request, standing, limit, now_s)
            late = {w for w, one in zip(estimates.workers, each, strict=True) if one.rejected}
            decision = self.explain(replace(request, exclude=request.exclude | late), now_s)
            at = estimates.workers.index(decision.worker)
            found = each[at]
        demand.evaluated(now_s, request, standing, limit.slack_s, admitted=True)
        if found.blocks:
            demand.spend(float(estimates.compute_s[at]))
        return decision

    # -- what a request costs -----------------------------------------------------------------

    def _estimate(self, request: RouteRequest, slots: Slots, now_s: float) -> Estimates:
        """The request priced on `slots`, by what each of them holds as the index has it; where the
        policy fetches, also with the longest prefix brought from its holder first."""
        model = self.at(slots[0]).model
        expected, size = model.outputs.guess(request.max_tokens), model.hasher.block_tokens
        hashes = request.prefix_hashes
        if request.token_ids is not None:
            hashes = model.hasher.prefix_hashes(request.token_ids, request.salt)
        elif hashes is None:
            hashes = NO_HASHES
        prompt = PricedPrompt(request.tokens, expected, size, hashes, request.session)
        device, cached, disk = held = self._held_tokens(model, prompt, slots)
        if request.handed_tokens:
            # They come into the host tier.
            handed = float(min(request.handed_tokens, prompt.tokens - 1) // size * size)
            disk = np.minimum(disk, np.maximum(device + cached - handed, 0.0))
            cached = np.maximum(cached, handed - device)
            held = Held(device, cached, disk)
        estimates = self.fleet.estimate(slots, now_s, prompt, held)
        if self.config.policy.fetches:
            leading = device + cached
            holder = least(-leading, estimates.net_backlog_s)
            if leading[holder]:
                everywhere = leading[holder] - device
                source = estimates.workers[holder], everywhere - cached
                held = Held(device, everywhere, held.disk)
                estimates.fetching = self.fleet.estimate(slots, now_s, prompt, held, source)
        self.plan_loads(estimates)
        if self.forecasting:
            self._forecast(estimates)
        return estimates

    def _held_tokens(self, model: ModelState, prompt: PricedPrompt, slots: Slots) -> Held:
        """Leading tokens that each worker has on the device, and further ones behind it.

        Workers that name the same LMCache server announce it. Each reports only what it stored or
        found itself, so what any of them holds, on the device or there, counts as held for all,
        behind each one's own device tokens. That is an estimate: a prompt's blocks on a device are
        in the server too, unless their store failed or was evicted; the engine's look-up then finds
        less and computes the rest.
        """
        hashes, size = prompt.prefix_hashes, prompt.block_tokens
        if not len(hashes):
            return Held(np.zeros(len(slots)), np.zeros(len(slots)), np.zeros(len(slots)))
        # An engine computes at least the last token: a full hit gives its last block back.
        usable = (prompt.tokens - 1) // size
        held = model.index.match_columns(hashes, usable)
        tokens = np.empty((3, len(slots)))
        ttft.leading_tokens(held, self.columns, slots, usable, size, tokens)
        device, cached, disk = tokens
        servers: dict[str, list[int]] = {}
        for row, slot in enumerate(slots if self.tiers_shared else ()):
            server = self.at(slot).announcement.shared_tier
            if server:
                servers.setdefault(server, []).append(row)
        for rows in servers.values():
            at: NDArray[np.intp] = np.array(rows)
            reach = float((device[at] + cached[at]).max())
            cached[at] = np.maximum(cached[at], reach - device[at])
        return Held(device, cached, disk)

    def _forecast(self, estimates: Estimates) -> None:
        """Replace the arithmetic of queues by each engine's forecast."""
        now_s = estimates.now_s
        for row, worker in enumerate(estimates.workers):
            queue, job = self.workers[worker].queue, engine_job("", estimates, row)
            ready_s = queue.first_token_s(job, now_s) + float(estimates.fixed_s[row]) / 2
            plan = estimates.plans.get(row)
            estimates.ttft_s[row] = ready_s - now_s - (plan.hidden_s if plan else 0.0)
            estimates.tpot_impact_s[row] = queue.decode_delay_s(job.new_tokens, job.context_tokens)
            link_s, gpu_s = queue.backlog_s(now_s)
            estimates.link_backlog_s[row], estimates.gpu_backlog_s[row] = link_s, gpu_s

"""The play of a run: requests arrive, are sent to nodes, end, and bring on the next turn.

Every request ends exactly once, completed or rejected; if something would be left waiting for ever,
the run raises instead. A request whose node dies is sent once more; lost twice, it is rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, nan

import numpy as np

from kappa_simulator.clusters import NodeModel
from kappa_simulator.dispatch import Dispatcher, SimulatedRoute
from kappa_simulator.faults import Failure, Faults, TransientFault
from kappa_simulator.job import SimulatedJob
from kappa_simulator.loop import Loop, Noise
from kappa_simulator.node import JobEvents, Node
from kappa_simulator.peer_fetch import PeerFetches
from kappa_simulator.traffic import Traffic


class SimulationError(RuntimeError):
    """Requests are left that nothing will ever serve: a fault of the rules, not of the input."""


class Play:
    """One run, event by event. Its lists hold the record of request k at index k."""

    def __init__(
        self,
        models: Sequence[NodeModel],
        traffic: Traffic,
        dispatcher: Dispatcher,
        faults: Faults,
        seed: int,
        report_period_s: float = 1.0,
    ) -> None:
        self.traffic, self.dispatcher = traffic, dispatcher
        self._loop, self._faults, self._seed = Loop(), faults, seed
        self._period_s = report_period_s
        total = traffic.requests
        self.arrival_s = [nan] * total
        self.ttft_s = [nan] * total
        self.tpot_s = [nan] * total
        self.e2e_s = [nan] * total
        self.node = [-1] * total
        self.device_tokens = [0] * total
        self.cached_tokens = [0] * total
        self.new_tokens = [0] * total
        self.retried = self.refusals = 0
        self.end_s = 0.0
        self._starts = iter(sorted(zip(traffic.first_s, traffic.base, strict=True)))
        self._left = total
        self._progress: Callable[[int, int], None] | None = None
        self._jobs: dict[int, SimulatedJob] = {}
        self._again: set[int] = set()
        self._tries: dict[int, int] = {}
        self._rng = np.random.default_rng((seed, 5))
        self._reported = [(-1, 0, 0, 0)] * len(models)
        self._session_of = traffic.session.tolist()
        self.nodes = self._make_nodes(models)
        self.fetches = PeerFetches(self._loop, self.nodes)
        # Of a client that sets one limit for all its requests.
        self._max_tokens = int(traffic.output_tokens.max()) if total else 1
        self._most = max(model.device_blocks * model.block_tokens for model in models)

    def _make_nodes(self, models: Sequence[NodeModel]) -> list[Node]:
        listens, sigma = self.dispatcher.listens, self._faults.noise_sigma
        admitted = self._admitted if listens else None
        events = JobEvents(self._first_token, self._finished, admitted)
        listener = self.dispatcher if listens else None
        nodes: list[Node] = []
        for index, model in enumerate(models):
            seeds = np.random.SeedSequence((self._seed, 3, index)).spawn(2)
            steps, link = (Noise(np.random.default_rng(seed), sigma) for seed in seeds)
            nodes.append(Node(index, model, self._loop, (steps, link), events, listener))
        return nodes

    def run(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Play everything to its end; `progress` receives how many requests ended, of how many.

        Raises:
            SimulationError: requests are left and nothing will ever happen to them.
        """
        loop, traffic = self._loop, self.traffic
        self._progress = progress
        self._warm_up()
        self._start_next()
        for straggler in self._faults.stragglers:
            loop.at(straggler.start_s, self._slow, (straggler.node, straggler.factor))
            loop.at(straggler.end_s, self._slow, (straggler.node, 1.0))
        for failure in self._faults.failures:
            loop.at(failure.at_s, self._fail, failure)
        for fault in self._faults.transients:
            loop.at(fault.start_s, self._transient, (fault, True))
            loop.at(fault.end_s, self._transient, (fault, False))
        if self.dispatcher.listens:
            loop.at(self._period_s, self._report)
        if self.dispatcher.share_s:
            loop.at(self.dispatcher.share_s, self._share)
        loop.run()
        for node in self.nodes:
            node.close()
        if self._left:
            raise SimulationError(
                f"{self._left} of {traffic.requests} requests never ended, the first is "
                f"{next(iter(self._jobs), '?')}"
            )

    def _warm_up(self) -> None:
        """Put the warm prefixes into host tiers, each on a node drawn by host capacity."""
        warm = self.traffic.warm
        sizes = np.array([node.model.host_blocks for node in self.nodes], dtype=np.float64)
        if not (warm and sizes.any()):
            return
        rng = np.random.default_rng((self._seed, 4))
        drawn = rng.choice(len(sizes), size=len(warm), p=sizes / sizes.sum()).tolist()
        home: dict[int, int] = {}
        for ids, node in zip(warm, drawn, strict=True):
            if len(ids):
                # One home for all that begin alike: a reader's history lies with the document.
                self.nodes[home.setdefault(ids.item(0), node)].memory.put_in_host(ids, len(ids))

    # -- a request's life ---------------------------------------------------------------------

    def _start_next(self) -> None:
        """Schedule the next session's first request: one at a time, as a short heap is faster."""
        following = next(self._starts, None)
        if following is not None:
            self._loop.at(following[0], self._start, following[1])

    def _start(self, key: int) -> None:
        self._start_next()
        self._arrive(key)

    def _arrive(self, key: int) -> None:
        now_s, patience_s = self._loop.now_s, self.traffic.clients.patience_s
        self.arrival_s[key] = now_s
        if patience_s < inf:
            self._loop.at(now_s + patience_s, self._leave, key)
        self._send(key)

    def _send(self, key: int, lost_on: int = -1) -> None:
        traffic, now_s = self.traffic, self._loop.now_s
        session = self._session_of[key]
        turn = traffic.turns[session][key - traffic.base[session]]
        route: SimulatedRoute | None = None
        if turn.input_tokens + turn.output_tokens <= self._most:
            route = self.dispatcher.choose(key, turn, traffic.ids[session], now_s, lost_on)
            if route is None and self._comes_again(key):
                return
        job = SimulatedJob(
            key, turn.input_tokens, turn.output_tokens, turn.kept_blocks, now_s,
            max_tokens=self._max_tokens, tenant=traffic.tenants[session],
        )  # fmt: skip
        if route is None:
            self._reject(key)
            return
        self.node[key] = route.node
        node = self.nodes[route.node]
        if not node.alive or not node.fits(turn.input_tokens, turn.output_tokens):
            self.dispatcher.finished(job, now_s)
            self._reject(key)
            return
        self._jobs[key] = job
        if route.fetch_tokens:
            self.fetches.fetch(job, route.fetch_from, route.node, route.fetch_tokens)
        else:
            self.fetches.submit(job, route.node)

    def _comes_again(self, key: int) -> bool:
        """Whether the client of a refused request will try again."""
        now_s, clients = self._loop.now_s, self.traffic.clients
        tries = self._tries[key] = self._tries.get(key, 0) + 1
        self.refusals += 1
        pause_s = clients.again_s(tries, self.dispatcher.retry_after_s, self._rng.random())
        if now_s + pause_s - self.arrival_s[key] >= clients.patience_s or pause_s == inf:
            return False
        self._loop.at(now_s + pause_s, self._send, key)
        return True

    def _leave(self, key: int) -> None:
        """Drop a request that still waits in an engine's queue as its client's patience ends."""
        job = self._jobs.get(key)
        if job is not None and job.first_s < 0 and self.nodes[self.node[key]].leave(job):
            del self._jobs[key]
            self.dispatcher.left(job, self._loop.now_s)
            self._reject(key)

    def _reject(self, key: int) -> None:
        self.node[key] = -1
        self.ttft_s[key] = nan
        self._end(key)

    def _end(self, key: int) -> None:
        """End a request: the session's next turn comes after its pause."""
        now_s = self._loop.now_s
        self._left -= 1
        self.end_s = now_s
        session, following = self._session_of[key], key + 1
        turns, base = self.traffic.turns[session], self.traffic.base[session]
        if following - base < len(turns):
            self._loop.at(now_s + turns[following - base].after_s, self._arrive, following)

    def _admitted(self, job: SimulatedJob) -> None:
        self.dispatcher.admitted(self.node[job.key], job)

    def _first_token(self, job: SimulatedJob) -> None:
        now_s, key = self._loop.now_s, job.key
        if key not in self._again or np.isnan(self.ttft_s[key]):
            self.ttft_s[key] = now_s - self.arrival_s[key]
        self.fetches.used(job)
        self.dispatcher.first_token(job, now_s)

    def _finished(self, job: SimulatedJob) -> None:
        now_s, key = self._loop.now_s, job.key
        del self._jobs[key]
        self.fetches.used(job)
        if job.output_tokens > 1:
            self.tpot_s[key] = (now_s - job.first_s) / (job.output_tokens - 1)
        self.e2e_s[key] = now_s - self.arrival_s[key]
        self.device_tokens[key] = job.device_tokens
        self.cached_tokens[key] = job.cached_tokens
        self.new_tokens[key] = job.prompt_tokens - job.device_tokens - job.cached_tokens
        self.dispatcher.finished(job, now_s)
        self._end(key)

    # -- reports and faults -------------------------------------------------------------------

    def _report(self, _: None) -> None:
        """Report the nodes that did something."""
        now_s = self._loop.now_s
        for node in self.nodes:
            link, spare = node.link, node.memory.spare_host_blocks
            done = (spare, node.totals.steps, link.up.load_blocks, link.down.store_blocks)
            if node.alive and done != self._reported[node.index]:
                self._reported[node.index] = done
                self.dispatcher.report(node, now_s)
        if self._progress is not None:
            self._progress(self.traffic.requests - self._left, self.traffic.requests)
        # With nothing else ahead the run cannot end, and `run` raises.
        if self._left and self._loop.pending:
            self._loop.at(now_s + self._period_s, self._report)

    def _share(self, _: None) -> None:
        self.dispatcher.share(self._loop.now_s)
        if self._left and self._loop.pending > 1:  # More than the reports.
            self._loop.at(self._loop.now_s + self.dispatcher.share_s, self._share)

    def _slow(self, what: tuple[int, float]) -> None:
        node, factor = what
        self.nodes[node].set_slow(factor)

    def _transient(self, what: tuple[TransientFault, bool]) -> None:
        fault, begins = what
        node = self.nodes[fault.node]
        if fault.kind == "slow_link":
            node.link.slow_down(fault.size if begins else node.slow)
        elif fault.kind == "loads_fail":
            node.loads_fail = begins
        else:
            self.dispatcher.transient_fault(fault, begins, node)

    def _fail(self, failure: Failure) -> None:
        node = self.nodes[failure.node]
        if not node.alive:
            return
        lost = [*self.fetches.lost(failure.node), *node.fail()]
        self.dispatcher.lost(failure.node)
        self._loop.at(self._loop.now_s + failure.down_s, self._recover, failure.node)
        for job in lost:
            del self._jobs[job.key]
            if job.key in self._again:
                self._reject(job.key)
                continue
            self._again.add(job.key)
            self.retried += 1
            self._send(job.key, failure.node)

    def _recover(self, index: int) -> None:
        self.nodes[index].alive = True
        self.dispatcher.back(index, self._loop.now_s)

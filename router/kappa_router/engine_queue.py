"""The engine queue model: the router's running, step-by-step forecast of one engine.

It replays, in closed form where it can, what a scheduler with chunked prefill does with the
requests that were sent there: loads queue on the link, prompts share the step's token budget,
decoding requests take a token each, blocks and `max_sequences` bound how many run. First come,
first served; but an engine that packs goes on past one that does not fit, and queues no load behind
a busy link. Tenants and starving requests are not forecast. Reports and first tokens correct it.
When one more request would have its first token is found by running a copy forward.

Pure: every method takes the time; the clock is real seconds (dilated on a paced node).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

from kappa_router.engine_fit import EngineSpeed, Work

# A forecast that would take longer than this many steps is cut off: it is "very late" anyway.
_MAX_STEPS = 2_000
_MANY = 1_000_000
_NEVER = math.inf
_ROUNDING = 1e-6


@dataclass(slots=True)
class EngineJob:
    """One request in the queue."""

    request_id: str
    arrival_s: float
    host_tokens: int
    # In the cache before the next new one: hits on the device and in host.
    context_tokens: int
    # Of the prompt, still to compute.
    new_tokens: int
    # Expected.
    output_tokens: int
    # Of `host_tokens`, those on disk.
    disk_tokens: int = 0
    # The rest is the forecast's own: when it was admitted and its load put on the link.
    queued_s: float = 0.0
    # When that load lands; infinite until it is admitted.
    loaded_s: float = _NEVER
    admitted: bool = False
    # Of the prompt, computed already.
    prefilled_tokens: int = 0
    decoded_tokens: int = 0

    @property
    def footprint_tokens(self) -> int:
        """Cache that it holds once admitted."""
        return self.context_tokens + self.new_tokens

    @property
    def decoding(self) -> bool:
        return self.new_tokens <= 0

    @property
    def loads(self) -> bool:
        """Whether a part of its prompt comes over the link."""
        return self.host_tokens > 0


# To copy them: several times as quick as `dataclasses.replace`.
_values = attrgetter(*EngineJob.__dataclass_fields__)


class EngineQueue:
    """The forecast of one engine; jobs are kept in the order of their arrival."""

    def __init__(self, speed: EngineSpeed) -> None:
        self.speed = speed
        self._jobs: dict[str, EngineJob] = {}
        self._now_s = self._link_free_s = 0.0
        # A busy engine polls for landed loads as a step starts, and schedules them after it.
        self._polled_s = 0.0
        # A forecast lets streams end after the tokens they are expected to make; the live state
        # keeps them until their end is reported.
        self._guess_ends = False
        # When the step that is under way ends, and at which speed; None while jobs change.
        self._under_way: tuple[float, EngineSpeed] | None = None

    def __len__(self) -> int:
        return len(self._jobs)

    # -- events -------------------------------------------------------------------------------

    def submit(self, job: EngineJob, now_s: float) -> None:
        self._change(now_s)
        self._jobs[job.request_id] = EngineJob(*_values(job))

    def correct(
        self, request_id: str, device: int, host: int, new: int, now_s: float, disk: int = 0
    ) -> None:
        """The engine admitted it, and reported what it really took (`disk` of `host` from disk);
        other loads move up or back."""
        self._change(now_s)
        job = self._jobs.get(request_id)
        if job is None or job.decoding:
            return
        # An engine computes at least a prompt's last token.
        new = max(new, 1)
        if not job.admitted:
            job.host_tokens, job.disk_tokens = host, disk
            job.context_tokens, job.new_tokens = device + host, new
            self._admit_at(job, now_s)
            return
        load_s = self.speed.load_s(host, disk)
        before_s, job.disk_tokens = self._load_s(job), disk
        if host == job.host_tokens and device + host == job.context_tokens - job.prefilled_tokens:
            if job.loads and not job.prefilled_tokens:
                # Its load was put on the link only now, which may be later than was thought.
                before = [other.loaded_s for other in self._jobs.values() if other.loads]
                job.queued_s = now_s
                free_s = max([now_s, *(at_s for at_s in before if at_s < job.loaded_s)])
                self._land(job, free_s + load_s)
            return
        if host != job.host_tokens and job.loads:
            start_s = max(job.loaded_s - before_s, job.queued_s)
            job.host_tokens = host
            self._land(job, start_s + load_s)
            if host <= 0:
                job.loaded_s = job.queued_s
        elif host != job.host_tokens:
            job.host_tokens = host
            self._admit_at(job, job.queued_s)
        job.prefilled_tokens = min(job.prefilled_tokens, new - 1) if job.loaded_s <= now_s else 0
        job.context_tokens = device + host + job.prefilled_tokens
        job.new_tokens = new - job.prefilled_tokens

    def prefilled(self, request_id: str, now_s: float) -> None:
        """Its first token has come, whatever the forecast thought."""
        self._change(now_s)
        job = self._jobs.get(request_id)
        if job is None or job.decoding:
            return
        if self._now_s < now_s:
            # The step that made this token ended just now, and with it what else it computed.
            _, done = self._schedule()
            if done.pop(request_id, 0):
                self._compute(done)
            self._polled_s, self._now_s = self._now_s, now_s
        if not job.admitted:
            job.queued_s = job.loaded_s = now_s
        elif job.loaded_s > now_s:
            self._land(job, now_s)
        job.context_tokens += job.new_tokens
        job.prefilled_tokens += job.new_tokens
        job.new_tokens, job.admitted = 0, True

    def finish(self, request_id: str, now_s: float) -> None:
        self._change(now_s)
        self._jobs.pop(request_id, None)

    def _change(self, now_s: float) -> None:
        """Jobs are about to change, at `now_s`."""
        self.advance(now_s)
        self._under_way = None

    def advance(self, now_s: float) -> None:
        """Bring the forecast to `now_s`: finish the steps that will have ended by then."""
        if self._under_way is not None:
            end_s, speed = self._under_way
            if end_s > now_s and speed is self.speed:
                return
            self._under_way = None
        for _ in range(_MAX_STEPS):
            if not self._jobs or not self._step(now_s):
                break
        if not any(job.decoding or job.loaded_s <= self._now_s for job in self._jobs.values()):
            self._now_s = self._polled_s = max(self._now_s, now_s)

    # -- the forecast -------------------------------------------------------------------------

    def first_token_s(self, job: EngineJob, now_s: float) -> float:
        """The time of the first token of `job` if it were sent now (same clock as `now_s`)."""
        self.advance(now_s)
        ahead = EngineQueue(self.speed)
        ahead._jobs = {n: EngineJob(*_values(known)) for n, known in self._jobs.items()}
        ahead._jobs.pop(job.request_id, None)
        mine = ahead._jobs[job.request_id] = EngineJob(*_values(job))
        ahead._now_s, ahead._link_free_s = self._now_s, self._link_free_s
        ahead._polled_s, ahead._guess_ends = self._polled_s, True
        for _ in range(_MAX_STEPS):
            if mine.decoding or not ahead._step(_NEVER):
                break
        # Cut off, or nothing to wait for: late, but never in the past.
        return max(ahead._now_s, now_s)

    def backlog_s(self, now_s: float) -> tuple[float, float]:
        """Seconds of queued work on (link, gpu), prompts only."""
        self.advance(now_s)
        link_s, gpu_s = max(self._link_free_s - now_s, 0.0), 0.0
        for job in self._jobs.values():
            if job.decoding:
                continue
            if not job.admitted:
                link_s += self._load_s(job)
            gpu_s += self.speed.step_s([(job.new_tokens, job.context_tokens)])
        return link_s, gpu_s

    def decode_delay_s(self, new_tokens: int, context_tokens: int) -> float:
        """Seconds by which prefilling this prompt would hold up those that decode, in total."""
        jobs = [job for job in self._jobs.values() if job.decoding]
        left = [max(job.output_tokens - job.decoded_tokens, 1) for job in jobs]
        decoding = [(1, job.context_tokens) for job in jobs]
        step_s, total_s = self.speed.step_s, 0.0
        alone_s = step_s(decoding)
        most = self.speed.most_tokens(decoding, context_tokens + new_tokens // 2)
        chunk = max(most - len(decoding), 1)
        # Every step with a part of the prompt in it delays a token of those that still decode.
        for i in range(max(left, default=0)):
            if new_tokens <= 0:
                break
            tokens = min(new_tokens, chunk)
            added_s = step_s([*decoding, (tokens, context_tokens)]) - alone_s
            total_s += added_s * sum(tokens_left > i for tokens_left in left)
            new_tokens, context_tokens = new_tokens - tokens, context_tokens + tokens
        return total_s

    # -- steps --------------------------------------------------------------------------------

    def _step(self, until_s: float) -> bool:
        """Run one step if it ends by `until_s`; False when there is nothing to run by then."""
        self._admit()
        work, done = self._schedule()
        if not work:
            return self._skip_to_next_event(until_s)
        duration_s = self.speed.step_s(work)
        if self._now_s + duration_s > until_s:
            self._under_way = self._now_s + duration_s, self.speed
            return False
        alike = self._alike(done)
        if alike > 1:
            steps, forward_s, last_s = self._fast_forward(work, duration_s, until_s, alike)
            # By rounding alone a poll would miss what landed as its step began.
            self._polled_s = max(self._now_s, self._now_s + forward_s - last_s)
            self._now_s += forward_s
            self._compute(done, steps)
            return True
        self._polled_s = self._now_s
        self._now_s += duration_s
        self._compute(done)
        return True

    def _skip_to_next_event(self, until_s: float) -> bool:
        """Nothing to compute: go to the next arrival or the next load that lands.

        An idle engine polls for landed loads all the time, so they are seen at once.
        """
        waiting = [job for job in self._jobs.values() if not job.decoding]
        if any(self._unseen(job) for job in waiting):
            self._polled_s = self._now_s
            return True
        events = [job.loaded_s if job.admitted else job.arrival_s for job in waiting]
        next_s = min((at_s for at_s in events if at_s > self._now_s), default=None)
        if next_s is None or next_s > until_s:
            return False
        self._now_s = self._polled_s = next_s
        return True

    def _unseen(self, job: EngineJob) -> bool:
        """Its load has landed, and the engine does not know yet."""
        return job.loads and self._polled_s < job.loaded_s <= self._now_s

    def _runnable(self, jobs: Iterable[EngineJob]) -> list[EngineJob]:
        """Those that decode, and those of which the engine knows that they can run: there was no
        load, or it has landed."""
        now_s, polled_s = self._now_s, self._polled_s
        return [
            job
            for job in jobs
            if job.new_tokens <= 0 or job.loaded_s <= (polled_s if job.host_tokens > 0 else now_s)
        ]

    def _alike(self, done: dict[str, int]) -> int:
        """The most steps from this one on that do the same: those in which all decode, or in
        which one prompt takes what the others leave of the budget, so that none is admitted."""
        prompts = [job for name in done if (job := self._jobs[name]).new_tokens > 0]
        if not prompts:
            return _MANY
        speed, tokens = self.speed, done[prompts[0].request_id]
        varies = speed.step_factor and len(done) > 1
        admits = speed.packs and not all(job.admitted for job in self._jobs.values())
        if len(prompts) > 1 or sum(done.values()) < speed.budget_tokens or varies or admits:
            return 1
        return (prompts[0].new_tokens - 1) // tokens

    def _fast_forward(
        self, work: Work, first_s: float, until_s: float, most: int
    ) -> tuple[int, float, float]:
        """Steps of one kind until something else happens: how many, their seconds, the last's."""
        jobs = self._jobs.values()
        waiting = [job for job in jobs if not job.decoding]
        arrivals = [job.arrival_s for job in waiting if not job.admitted]
        landings = [job.loaded_s for job in waiting if job.loads and job.admitted]
        steps = 1 if any(self._unseen(job) for job in waiting) else most
        if self._guess_ends:
            left = (j.output_tokens - j.decoded_tokens for j in jobs if j.decoding)
            steps = min((steps, *left))
        growth_s = self._later_step_s(work, 1) - first_s
        # An event waits for the end of the step that it falls into; a landing is seen as the next
        # step starts, and waits for the end of that one too.
        for events, more in ((arrivals, 0), (landings, 1)):
            later = [at_s for at_s in events if at_s > self._now_s]
            if later:
                until_event = _steps_in(min(later) - self._now_s, first_s, growth_s)
                steps = min(steps, math.ceil(until_event - _ROUNDING) + more)
        if until_s < _NEVER:
            steps = min(steps, int(_steps_in(until_s - self._now_s, first_s, growth_s)))
        # Contexts grow by as much in every step, and durations evenly with them, until attention's
        # reads overtake its computing or the reverse.
        while steps > 1:
            last_s = first_s + (steps - 1) * growth_s
            if math.isclose(self._later_step_s(work, steps - 1), last_s, rel_tol=1e-9):
                break
            steps //= 2
        steps = max(steps, 1)
        total_s = steps * first_s + 0.5 * steps * (steps - 1) * growth_s
        return steps, total_s, first_s + (steps - 1) * growth_s

    def _later_step_s(self, work: Work, steps: int) -> float:
        return self.speed.step_s([(new, context + steps * new) for new, context in work])

    def _admit(self) -> None:
        """Give cache and a place on the link to those that have arrived, in order.

        A first-come engine looks at those that wait only while its step has tokens to spare: behind
        a long prompt not even a load begins.
        """
        jobs = self._jobs.values()
        waiting = [job for job in jobs if not job.admitted and job.arrival_s <= self._now_s]
        if not waiting:
            return
        admitted = [job for job in jobs if job.admitted]
        held = sum([job.footprint_tokens for job in admitted])
        budget = self.speed.budget_tokens
        budget -= sum([max(job.new_tokens, 1) for job in self._runnable(admitted)])
        packs, capacity = self.speed.packs, self.speed.capacity_tokens
        places = (self.speed.max_sequences or _MANY) - len(admitted)
        for job in waiting:
            fits = places > 0 and (not held or held + job.footprint_tokens <= capacity)
            if packs and job.loads:
                fits = fits and self._link_free_s <= self._now_s
            elif budget <= 0:
                fits = False
            if fits:
                held += job.footprint_tokens
                places -= 1
                self._admit_at(job, self._now_s)
                if not job.loads:
                    budget -= job.new_tokens
            elif not packs:
                break

    def _admit_at(self, job: EngineJob, at_s: float) -> None:
        """Admit a job: its load, if it has one, goes to the end of the link's queue."""
        job.admitted, job.queued_s, job.loaded_s = True, at_s, at_s
        if job.loads:
            start_s = max(at_s, self._link_free_s)
            job.loaded_s = self._link_free_s = start_s + self._load_s(job)

    def _load_s(self, job: EngineJob) -> float:
        return self.speed.load_s(job.host_tokens, job.disk_tokens)

    def _land(self, job: EngineJob, at_s: float) -> None:
        """A load lands at another time than was thought: those behind it on the link follow."""
        was_s, job.loaded_s = job.loaded_s, at_s
        others = [o for o in self._jobs.values() if o is not job and o.loads and o.admitted]
        free_s = at_s
        for other in sorted(others, key=lambda other: other.loaded_s):
            if other.loaded_s > was_s:
                start_s = max(free_s, other.queued_s)
                other.loaded_s = start_s + self._load_s(other)
            free_s = max(free_s, other.loaded_s)
        self._link_free_s = free_s

    def _schedule(self) -> tuple[Work, dict[str, int]]:
        """Fill one step: decoding requests first, then prompts in order, within the budget."""
        budget = self.speed.budget_tokens
        work: Work = []
        done: dict[str, int] = {}
        prompts = []
        for name, job in self._jobs.items():
            if job.new_tokens > 0:
                prompts.append(job)
            elif budget > 0:
                work.append((1, job.context_tokens))
                done[name] = 1
                budget -= 1
        # A prompt that has begun goes on before another begins.
        prompts.sort(key=lambda job: job.prefilled_tokens == 0)
        prompts = self._runnable(prompts)
        if prompts:
            head, waited_s = prompts[0], self._now_s - prompts[0].arrival_s
            most = self.speed.most_tokens(work, head.context_tokens, head.new_tokens, waited_s)
            budget = min(budget, most - len(work))
        for job in prompts:
            if budget <= 0:
                break
            tokens = min(job.new_tokens, budget)
            work.append((tokens, job.context_tokens))
            done[job.request_id] = tokens
            budget -= tokens
        return work, done

    def _compute(self, done: dict[str, int], steps: int = 1) -> None:
        """Each of `steps` steps computed this many tokens of each."""
        for request_id, tokens in done.items():
            job = self._jobs[request_id]
            if job.new_tokens > 0:
                job.context_tokens += steps * tokens
                job.prefilled_tokens += steps * tokens
                job.new_tokens -= steps * tokens
                continue
            job.context_tokens += steps
            job.decoded_tokens += steps
            if self._guess_ends and job.decoded_tokens >= job.output_tokens:
                del self._jobs[request_id]


def _steps_in(seconds: float, first_s: float, growth_s: float) -> float:
    """The steps, the first `first_s` long and each `growth_s` longer, that fit into `seconds`."""
    level_s = first_s - 0.5 * growth_s
    divisor_s = level_s + math.sqrt(level_s * level_s + 2 * growth_s * seconds)
    return min(2 * seconds / divisor_s, _MANY) if divisor_s > 0 else _MANY

"""A worker's shadow: the router's running forecast of one engine.

It replays, in closed form where it can, what a first-come scheduler with chunked prefill does with
the requests that the router sent there: loads queue on the link, prompts share the step's token
budget, decoding requests take a token each, blocks bound how many run. Reports and first tokens
correct it. Asked "when would this one's first token come?", it runs a copy of itself forward.

Pure: every method takes the time; the clock is real seconds (dilated on a paced node).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from kappa.step import StepModel

# A forecast that would take longer than this many steps is cut off: it is "very late" anyway.
_MAX_STEPS = 2_000
_MANY = 1_000_000
_NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """What the forecast needs of a worker: steps, link, budget and room, in real seconds."""

    step: StepModel
    load_token_s: float
    load_fixed_s: float
    budget_tokens: int
    capacity_tokens: int

    def load_s(self, tokens: int) -> float:
        """Real seconds of link time for `tokens` tokens; none costs nothing."""
        return self.load_fixed_s + tokens * self.load_token_s if tokens > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Job:
    """One request as the forecast sees it.

    context_tokens: tokens in the cache before the next new one (device and host hits).
    new_tokens: prompt tokens still to compute. output_tokens: what it is expected to decode.
    """

    request_id: str
    arrival_s: float
    host_tokens: int
    context_tokens: int
    new_tokens: int
    output_tokens: int
    loaded_s: float | None = None
    admitted: bool = False
    decoded_tokens: int = 0

    @property
    def footprint_tokens(self) -> int:
        """Cache room it holds once admitted."""
        return self.context_tokens + self.new_tokens

    @property
    def decoding(self) -> bool:
        """Whether its prompt is done."""
        return self.new_tokens <= 0


class Shadow:
    """The forecast of one engine; jobs are kept in the order of their arrival."""

    def __init__(self, speed: EngineSpeed) -> None:
        self.speed = speed
        self._jobs: dict[str, Job] = {}
        self._now_s = 0.0
        self._link_free_s = 0.0
        # A forecast lets streams end after the tokens they are expected to make; the live state
        # keeps them until their end is heard of.
        self._guess_ends = False

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._jobs

    @property
    def waiting(self) -> int:
        """Requests whose first token has not come."""
        return sum(not job.decoding for job in self._jobs.values())

    @property
    def decoding(self) -> int:
        """Requests that decode."""
        return sum(job.decoding for job in self._jobs.values())

    def submit(self, job: Job, now_s: float) -> None:
        """A request was sent to the engine."""
        self.advance(now_s)
        self._jobs[job.request_id] = job

    def correct(self, request_id: str, device: int, host: int, new: int, now_s: float) -> None:
        """The engine said what it really took; a load it did not need is taken off the link."""
        self.advance(now_s)
        job = self._jobs.get(request_id)
        if job is None or job.decoding:
            return
        if host == job.host_tokens and device + host == job.context_tokens:
            return
        change_s = self.speed.load_s(host) - self.speed.load_s(job.host_tokens)
        loaded_s = job.loaded_s
        if loaded_s is not None:
            loaded_s += change_s
            self._link_free_s += change_s
        self._jobs[request_id] = replace(
            job,
            host_tokens=host,
            context_tokens=device + host,
            new_tokens=new,
            loaded_s=loaded_s,
            admitted=True,
        )

    def prefilled(self, request_id: str, now_s: float) -> None:
        """Its first token has come, whatever the forecast thought."""
        self.advance(now_s)
        job = self._jobs.get(request_id)
        if job is None or job.decoding:
            return
        self._jobs[request_id] = replace(
            job,
            context_tokens=job.context_tokens + job.new_tokens,
            new_tokens=0,
            admitted=True,
            loaded_s=min(job.loaded_s, now_s) if job.loaded_s is not None else now_s,
        )
        # The step that made this token ended just now, so the next one starts here.
        self._now_s = now_s

    def finish(self, request_id: str, now_s: float) -> None:
        """The request left the engine."""
        self.advance(now_s)
        self._jobs.pop(request_id, None)

    def first_token_s(self, job: Job, now_s: float) -> float:
        """When the first token of `job` would come if it were sent now (same clock as `now_s`)."""
        self.advance(now_s)
        ahead = Shadow(self.speed)
        ahead._jobs = {**self._jobs, job.request_id: job}
        ahead._now_s, ahead._link_free_s = self._now_s, self._link_free_s
        ahead._guess_ends = True
        for _ in range(_MAX_STEPS):
            if ahead._jobs[job.request_id].decoding or not ahead._step(_NEVER):
                break
        return ahead._now_s

    def backlog_s(self, now_s: float) -> tuple[float, float]:
        """Seconds of queued work on (link, gpu), prompts only."""
        self.advance(now_s)
        link_s = max(self._link_free_s - now_s, 0.0)
        step = self.speed.step
        gpu_s = 0.0
        for job in self._jobs.values():
            if job.decoding:
                continue
            if job.loaded_s is None:
                link_s += self.speed.load_s(job.host_tokens)
            gpu_s += step.real_s([(job.new_tokens, job.context_tokens)])
        return link_s, gpu_s

    def decode_delay_s(self, new_tokens: int, context_tokens: int) -> float:
        """Seconds by which prefilling this prompt would hold up those that decode, in total."""
        decoding = [(1, job.context_tokens) for job in self._jobs.values() if job.decoding]
        if not decoding:
            return 0.0
        step = self.speed.step
        added_s = step.real_s([*decoding, (new_tokens, context_tokens)]) - step.real_s(decoding)
        return added_s * len(decoding)

    def advance(self, now_s: float) -> None:
        """Bring the forecast to `now_s`: finish the steps that will have ended by then."""
        for _ in range(_MAX_STEPS):
            if not self._jobs or not self._step(now_s):
                break
        if not any(self._runnable(job, self._now_s) for job in self._jobs.values()):
            self._now_s = max(self._now_s, now_s)

    def _runnable(self, job: Job, at_s: float) -> bool:
        return job.decoding or (job.loaded_s is not None and job.loaded_s <= at_s)

    def _step(self, until_s: float) -> bool:
        """Run one step if it ends by `until_s`; False when there is nothing to run by then."""
        self._admit()
        work, done = self._schedule()
        if not work:
            return self._skip_to_next_event(until_s)
        duration_s = self.speed.step.real_s(work)
        if self._now_s + duration_s > until_s:
            return False
        if all(self._jobs[request_id].decoding for request_id in done):
            steps = self._equal_steps(until_s, duration_s)
            self._now_s += steps * duration_s
            self._decode(done, steps)
            return True
        self._now_s += duration_s
        self._decode([r for r in done if self._jobs[r].decoding], 1)
        self._prefill(done)
        return True

    def _skip_to_next_event(self, until_s: float) -> bool:
        """Nothing to compute: go to the next arrival or the next load that lands."""
        events = [
            job.arrival_s if not job.admitted else job.loaded_s
            for job in self._jobs.values()
            if not job.decoding
        ]
        later = [at_s for at_s in events if at_s is not None and at_s > self._now_s]
        if not later or min(later) > until_s:
            return False
        self._now_s = min(later)
        return True

    def _equal_steps(self, until_s: float, duration_s: float) -> int:
        """How many decode-only steps pass before something else can happen."""
        pending = [
            at_s
            for job in self._jobs.values()
            if not job.decoding
            for at_s in (job.arrival_s, job.loaded_s)
            if at_s is not None and at_s > self._now_s
        ]
        horizon_s = min([until_s, *pending])
        # A step in progress ends after the event: the event waits for the boundary.
        steps = math.ceil((horizon_s - self._now_s) / duration_s) if horizon_s < _NEVER else _MANY
        if horizon_s == until_s:
            steps = int((horizon_s - self._now_s) / duration_s)
        if self._guess_ends:
            left = [j.output_tokens - j.decoded_tokens for j in self._jobs.values() if j.decoding]
            steps = min(steps, *left)
        return max(steps, 1)

    def _admit(self) -> None:
        """Give room and a place on the link to those that have arrived, in order."""
        held = sum(job.footprint_tokens for job in self._jobs.values() if job.admitted)
        for request_id, job in self._jobs.items():
            if job.admitted:
                continue
            if job.arrival_s > self._now_s:
                continue
            if held and held + job.footprint_tokens > self.speed.capacity_tokens:
                break
            held += job.footprint_tokens
            loaded_s = self._now_s
            if job.host_tokens > 0:
                start_s = max(self._now_s, self._link_free_s)
                loaded_s = self._link_free_s = start_s + self.speed.load_s(job.host_tokens)
            self._jobs[request_id] = replace(job, admitted=True, loaded_s=loaded_s)

    def _schedule(self) -> tuple[list[tuple[int, int]], dict[str, int]]:
        """Fill one step: decoding requests first, then prompts in order, within the budget."""
        budget = self.speed.budget_tokens
        work: list[tuple[int, int]] = []
        done: dict[str, int] = {}
        for job in self._jobs.values():
            if job.decoding and budget > 0:
                work.append((1, job.context_tokens))
                done[job.request_id] = 1
                budget -= 1
        for job in self._jobs.values():
            if budget <= 0:
                break
            if job.decoding or not job.admitted or not self._runnable(job, self._now_s):
                continue
            tokens = min(job.new_tokens, budget)
            work.append((tokens, job.context_tokens))
            done[job.request_id] = tokens
            budget -= tokens
        return work, done

    def _decode(self, request_ids: Iterable[str], steps: int) -> None:
        for request_id in list(request_ids):
            job = self._jobs[request_id]
            if self._guess_ends and job.decoded_tokens + steps >= job.output_tokens:
                del self._jobs[request_id]
                continue
            self._jobs[request_id] = replace(
                job,
                context_tokens=job.context_tokens + steps,
                decoded_tokens=job.decoded_tokens + steps,
            )

    def _prefill(self, done: dict[str, int]) -> None:
        for request_id, tokens in done.items():
            job = self._jobs.get(request_id)
            if job is not None and not job.decoding:
                self._jobs[request_id] = replace(
                    job,
                    context_tokens=job.context_tokens + tokens,
                    new_tokens=job.new_tokens - tokens,
                )

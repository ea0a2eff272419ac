"""A small engine for tests: blocks with shared chains, chunked iterations, a serial link, decoding.

Everything is counted as simply as can be, and checked at every turn: it is what the rule's promises
are held against.
"""

from __future__ import annotations

from kappa_scheduler.work import Quote, Room, Work


class Request(Work):
    """chain, prefix: its first `prefix` tokens are those of all others with the same chain;
    host_tokens: of its prompt, in the host tier; output: tokens that it will generate."""

    def __init__(self, tokens, output=0, tenant="", chain=0, prefix=0, host_tokens=0, bound=None):
        super().__init__(tokens, 0.0, output if bound is None else bound, tenant)
        self.prompt_tokens = tokens
        self.chain = chain
        self.prefix = min(prefix, tokens)
        self.host_tokens = min(host_tokens, tokens - 1)
        self.output = output
        self.generated = 0


class Blocks:
    """Blocks; the prefixes of a chain are held once, as far as the longest holder goes."""

    def __init__(self, capacity, block_tokens=1):
        self.capacity_blocks = capacity
        self.block_tokens = block_tokens
        self.version = 0
        self.holders = {}
        self.waited_for = {}

    def of(self, tokens):
        return -(-tokens // self.block_tokens)

    def on_chain(self, request):
        # At least one token of a prompt is computed, so its last block is never another's.
        return min(request.prefix, request.prompt_tokens - 1) // self.block_tokens

    def chain_blocks(self, chain):
        return max((self.on_chain(r) for r in self.holders if r.chain == chain), default=0)

    def used(self):
        private = sum(held - self.on_chain(r) for r, held in self.holders.items())
        return private + sum(self.chain_blocks(c) for c in {r.chain for r in self.holders})

    def available(self):
        return self.capacity_blocks - self.used()

    def quote(self, request):
        if any(other.chain == request.chain != 0 for other in self.waited_for):
            return None
        shared = min(self.on_chain(request), self.chain_blocks(request.chain))
        found = shared * self.block_tokens
        host = max(request.host_tokens - found, 0)
        host -= host % self.block_tokens
        key = request.chain if self.on_chain(request) else 0
        return Quote(self.of(request.total_tokens) - shared, found, host, shared, key)

    def take(self, request, quote):
        assert request not in self.holders, "admitted twice"
        self.holders[request] = self.of(request.total_tokens)
        if quote.host_tokens:
            self.waited_for[request] = None
        assert self.available() >= 0, "more blocks than there are"
        return quote

    def grow(self, request):
        if self.available() < 1:
            return False
        self.holders[request] += 1
        request.grown_blocks += 1
        return True

    def release(self, request):
        del self.holders[request]
        self.waited_for.pop(request, None)
        self.version += 1


class Engine:
    """Iterations of one second unless given; loads take `load_s` seconds a token."""

    def __init__(self, rule, memory, budget=8, slots=64, load_s=0.0, iteration_s=1.0):
        self.rule, self.memory = rule, memory
        self.budget, self.slots = budget, slots
        self.load_s, self.iteration_s = load_s, iteration_s
        self.now_s = 0.0
        self.waiting, self.running, self.ready = {}, {}, []
        self.loads = []
        self.done, self.admitted_at, self.order = {}, {}, []
        self.plan = None
        self.had_budget = self.had_slots = True
        self.held_before = set()
        self.last_reserved = None
        self.preemptions = 0

    def add(self, request):
        request.arrival_s = self.now_s
        self.waiting[request] = None
        self.rule.add(request, self.now_s)
        return request

    @property
    def held(self):
        return [*self.running, *self.ready, *(r for _, r in self.loads)]

    def iterate(self, seconds=None):
        """One iteration; what it finished."""
        self._land()
        tokens, budget = {}, self.budget
        self._decode(tokens)
        budget -= sum(tokens.values())
        chunks = []
        for request in [r for r in self.running if r.computed_tokens < r.total_tokens]:
            budget -= self._chunk(request, budget, chunks)
        while self.ready and budget > 0 and len(self.running) < self.slots:
            request = self.ready.pop(0)
            self.running[request] = None
            budget -= self._chunk(request, budget, chunks)
        self.held_before = set(self.held)
        self.last_reserved = self.plan.reserved if self.plan else None
        self.had_budget, self.had_slots = budget > 0, len(self.running) < self.slots
        room = Room(self.memory, budget, self.slots - len(self.running), len(self.held))
        self.plan = self.rule.plan(room, self.now_s)
        for request, quote in self.plan.admitted:
            del self.waiting[request]
            self.admitted_at[request] = self.now_s
            self.order.append(request)
            request.computed_tokens = quote.device_tokens + quote.host_tokens
            if quote.host_tokens:
                free_s = max([self.now_s, *(end for end, _ in self.loads)])
                self.loads.append((free_s + quote.host_tokens * self.load_s, request))
                continue
            self.running[request] = None
            budget -= self._chunk(request, budget, chunks)
        for request, new in chunks:
            tokens[request.tenant] = tokens.get(request.tenant, 0) + new
        seconds = self.iteration_s if seconds is None else seconds
        self.now_s += seconds
        self.rule.ran(seconds, tokens, self.now_s)
        return self._finish()

    def _land(self):
        for end, request in list(self.loads):
            if end <= self.now_s:
                self.loads.remove((end, request))
                self.memory.waited_for.pop(request, None)
                self.memory.version += 1
                self.ready.append(request)
                self.rule.landed(request, self.now_s)

    def _decode(self, tokens):
        for request in list(self.running):
            if request not in self.running or request.computed_tokens < request.total_tokens:
                continue
            if request.generated >= request.output:
                continue
            need = self.memory.of(request.prompt_tokens + request.generated + 1)
            while need > self.memory.holders.get(request, need) and not self.memory.grow(request):
                self.preempt(self.rule.victim(list(self.running)))
            if request in self.running:
                request.generated += 1
                tokens[request.tenant] = tokens.get(request.tenant, 0) + 1

    def _chunk(self, request, budget, chunks):
        new = min(max(budget, 0), request.total_tokens - request.computed_tokens)
        request.computed_tokens += new
        if new:
            chunks.append((request, new))
        return new

    def _finish(self):
        over = [
            r
            for r in self.running
            if r.computed_tokens >= r.total_tokens and r.generated >= r.output
        ]
        for request in over:
            self.end(request)
        return over

    def end(self, request):
        """It is over, wherever it was."""
        if request in self.waiting:
            del self.waiting[request]
            self.rule.aborted(request, self.now_s)
            return
        self.forget(request)
        self.memory.release(request)
        self.done[request] = self.now_s
        self.rule.finished(request, request.generated, self.now_s)

    def forget(self, request):
        self.running.pop(request, None)
        if request in self.ready:
            self.ready.remove(request)
        self.loads = [load for load in self.loads if load[1] is not request]

    def preempt(self, request):
        """It loses its blocks."""
        self.preemptions += 1
        self.forget(request)
        self.memory.release(request)
        request.total_tokens = request.prompt_tokens + request.generated
        request.computed_tokens = 0
        self.waiting[request] = None
        self.rule.preempted(request, self.now_s)

    def give_back(self, request):
        """As an engine that could not admit what was planned."""
        self.forget(request)
        self.memory.release(request)
        request.computed_tokens = 0
        self.waiting[request] = None
        self.rule.returned(request, self.now_s)

    def run(self, iterations=10_000):
        """Until nothing is left."""
        for _ in range(iterations):
            if not self.waiting and not self.held:
                return
            self.iterate()
        raise AssertionError(f"{len(self.waiting)} wait, {len(self.held)} run, for ever")

"""A memory that only counts blocks of one token."""

from kappa_scheduler.work import Quote


class Blocks:
    """Blocks of one token each; hits as given per request.

    cached: tokens on the device and in the host tier; shared: of those on the device, held by
    others already. awaited: requests that need a prefix that is being loaded for another.
    """

    block_tokens = 1

    def __init__(self, blocks=10_000):
        self.capacity_blocks = self.free = blocks
        self.version = 0
        self.cached = {}
        self.shared = {}
        self.awaited = set()
        self.taken = {}

    def quote(self, work):
        if work in self.awaited:
            return None
        device, host = self.cached.get(work, (0, 0))
        shared = self.shared.get(work, 0)
        return Quote(work.total_tokens - shared, device, host, shared, 1 if shared else 0)

    def available(self):
        return self.free

    def take(self, work, quote):
        assert quote.blocks <= self.free
        self.free -= quote.blocks
        self.taken[work] = quote.blocks
        return quote

    def release(self, work):
        self.free += self.taken.pop(work)
        self.version += 1

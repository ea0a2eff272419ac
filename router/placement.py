"""What the first request of a session or document costs those that come back for its prefix.

KV is where it was made: a prefix computed on a node with a slow link is loaded over that link by
every follow-up that no longer finds it on the device. So a prompt that nobody holds yet is charged,
on each worker, its tokens times the worker's load seconds a token, times the loads to be expected:
follow-ups per new prefix, times the share of held tokens that had to be loaded. Both are learnt
from what was routed; until then nothing is charged. `router.prices` adds it to its score.
"""

from __future__ import annotations

from router.offers import Floats, Offers

# Weight that the past keeps at each request: means over about a thousand of them.
_KEEP = 0.999
_FEWEST_NEW = 5.0


class FutureLoads:
    """Learns how often prefixes are asked for again, and from where."""

    def __init__(self) -> None:
        self._new = self._again = 0.0
        self._loaded_tokens = self._held_tokens = 0.0

    def routed(self, offers: Offers, index: int) -> None:
        """A request goes to row `index`."""
        held = offers.prompt_tokens - float(offers.new_tokens[index])
        first = is_first(offers)
        self._new = self._new * _KEEP + first
        self._again = self._again * _KEEP + (not first)
        self._loaded_tokens = self._loaded_tokens * _KEEP + float(offers.cached_tokens[index])
        self._held_tokens = self._held_tokens * _KEEP + held

    @property
    def loads(self) -> float:
        """Loads to be expected of a new prefix; 0 while too little is known."""
        if self._new < _FEWEST_NEW or self._held_tokens <= 0:
            return 0.0
        return self._again / self._new * self._loaded_tokens / self._held_tokens

    def cost_s(self, offers: Offers) -> Floats:
        """Link seconds that a prompt's follow-ups will take on each worker."""
        seconds: Floats = offers.prompt_tokens * self.loads * offers.load_token_s
        return seconds


def is_first(offers: Offers) -> bool:
    """Whether nobody holds as much as half of the prompt."""
    return 2 * float(offers.new_tokens.min()) > offers.prompt_tokens

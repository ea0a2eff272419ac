"""How often a prefix will be asked for again, learnt from what has been asked.

A request whose prompt is mostly held somewhere is a reuse, any other a first. Among prompts of
about one length, reuses per first is how many follow-ups a first can expect (and, as long as the
end of a session is no more likely early than late, what a follow-up can still expect). Counts fade,
so that a changed workload is noticed. Pure.
"""

from __future__ import annotations

_BUCKETS = 24
_KEEP = 0.998
# Until something is known: a first is as likely to come back once as not.
_PRIOR_FIRSTS, _PRIOR_REUSES = 4.0, 2.0
_MOST = 200.0


class ReuseForecast:
    """Reuses per first, by the binary order of the prompt's length."""

    def __init__(self) -> None:
        self._firsts = [0.0] * _BUCKETS
        self._reuses = [0.0] * _BUCKETS

    def saw(self, prompt_tokens: int, held_tokens: float) -> None:
        """A prompt was asked for, of which so many tokens were held somewhere."""
        bucket = _bucket(prompt_tokens)
        self._firsts[bucket] *= _KEEP
        self._reuses[bucket] *= _KEEP
        if held_tokens >= 0.5 * prompt_tokens:
            self._reuses[bucket] += 1.0
        else:
            self._firsts[bucket] += 1.0

    def expected(self, prompt_tokens: int) -> float:
        """Follow-ups still to come of a prompt this long."""
        bucket = _bucket(prompt_tokens)
        reuses = self._reuses[bucket] + _PRIOR_REUSES
        return min(reuses / (self._firsts[bucket] + _PRIOR_FIRSTS), _MOST)


def _bucket(prompt_tokens: int) -> int:
    return min(max(prompt_tokens, 1).bit_length(), _BUCKETS - 1)

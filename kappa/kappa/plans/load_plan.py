"""A load plan as data: the way in which each run of a cached prefix comes back, and its cost.

Planners of this package make `LoadPlan`s, the engine executes them, the router reads their seconds.
A plan covers the cached tokens [0, cached_tokens) in order. Kinds: K loads keys and values; A loads
activations and projects keys and values from them; R computes from token ids; C stays in host
memory, where the CPU attends to it as the request decodes; S loads a sparse choice of keys and
values, which alone changes the model's output.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from kappa.checks import check_not_negative

Kind = Literal["K", "A", "R", "C", "S"]

_WORDS = {"K": "load", "A": "activations", "R": "recompute", "C": "cpu", "S": "sparse"}


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of cached tokens [start_tokens, end_tokens) that comes back in one way."""

    kind: Kind
    start_tokens: int
    end_tokens: int

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"Segment.kind is {self.kind!r}: use one of {get_args(Kind)}")
        if not 0 <= self.start_tokens < self.end_tokens:
            raise ValueError(
                f"Segment {self.kind} [{self.start_tokens}, {self.end_tokens}): "
                "give a run of one token or more that starts at 0 or later"
            )

    @property
    def tokens(self) -> int:
        return self.end_tokens - self.start_tokens


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Segments that cover [0, cached_tokens) without gap or overlap, in order, and their cost.

    Seconds are undilated and predicted.

    Raises:
        ValueError: a plan that leaves a token out, or that no causal model can execute.
    """

    segments: tuple[Segment, ...]  # empty for a request without cached tokens
    ttft_s: float = 0.0  # link and gpu time under the plan's overlap
    load_s: float = 0.0  # link time
    compute_s: float = 0.0  # gpu time, new tokens included
    load_bytes: float = 0.0  # cross the link
    # One decoding step of the request alone, where part of its prefix stays in host memory (C).
    step_s: float = 0.0
    exact: bool = True  # False where the model's output changes
    why: str = ""  # the planner's reason, a sentence

    def __post_init__(self) -> None:
        check_not_negative(self, "ttft_s", "load_s", "compute_s", "load_bytes", "step_s")
        end_tokens = 0
        for segment in self.segments:
            if segment.start_tokens != end_tokens:
                problem = "leaves a gap" if segment.start_tokens > end_tokens else "overlaps"
                raise ValueError(
                    f"LoadPlan: segment {segment.kind} starts at {segment.start_tokens} where the "
                    f"cover has reached {end_tokens} ({problem}): start it at {end_tokens}"
                )
            end_tokens = segment.end_tokens
        # A token can be computed only where all before it are known, layer by layer. At the front
        # nothing comes before; at the back all that does is loaded. In the middle, or at both ends
        # at once, a layer would run three times, which no executor of ours does.
        kinds = "".join(segment.kind for segment in self.segments)
        if not re.fullmatch("R*[^R]*|[^R]*R*", kinds):
            runs = [(s.start_tokens, s.end_tokens) for s in self.segments if s.kind == "R"]
            raise ValueError(
                "LoadPlan: recompute (R) is one run, at the front [0, l) or at the back [S-r, S): "
                f"got R at {runs}"
            )
        if self.exact and "S" in kinds:
            raise ValueError("LoadPlan.exact is True with a sparse segment: give exact=False")

    @property
    def cached_tokens(self) -> int:
        return self.segments[-1].end_tokens if self.segments else 0

    @property
    def kind(self) -> str:
        """The kinds in words, in the order in which they first appear ("recompute+load")."""
        return "+".join(dict.fromkeys(_WORDS[s.kind] for s in self.segments)) or "load"

    def tokens(self, kind: Kind) -> int:
        """Cached tokens that come back in the way of `kind`."""
        return sum(s.tokens for s in self.segments if s.kind == kind)

    @property
    def crossing_tokens(self) -> int:
        """Cached tokens that cross the link before the first token, as KV or as activations.

        Those of C do too, layer by layer, and are not kept; the rest is computed.
        """
        return self.tokens("K") + self.tokens("A") + self.tokens("C")

    @property
    def hidden_s(self) -> float:
        """Seconds of the shorter of link and gpu work that hide behind the longer."""
        return max(self.load_s + self.compute_s - self.ttft_s, 0.0)


def layout(
    cached_tokens: int, *, recompute: int = 0, activations: int = 0, tail: bool = False
) -> tuple[Segment, ...]:
    """Segments R, A, K in this order, or A, K, R with `tail`; other tokens are K."""
    loaded = cached_tokens - recompute - activations
    order: list[tuple[Kind, int]] = [("A", activations), ("K", loaded)]
    order.insert(2 if tail else 0, ("R", recompute))
    return from_runs(order)


def from_runs(runs: Iterable[tuple[Kind, int]]) -> tuple[Segment, ...]:
    """Segments from (kind, tokens) in order: neighbours of one kind merge, empty runs vanish.

    A block table read front to back gives such runs.
    """
    segments: list[Segment] = []
    end_tokens = 0
    for kind, tokens in runs:
        if tokens == 0:
            continue
        start_tokens = end_tokens
        end_tokens += tokens
        if segments and segments[-1].kind == kind:
            start_tokens = segments.pop().start_tokens
        segments.append(Segment(kind, start_tokens, end_tokens))
    return tuple(segments)


def bounded(plan: LoadPlan, most_tokens: int) -> LoadPlan:
    """The plan with `most_tokens` tokens at most recomputed at the front; the next ones are loaded.

    An engine computes such a front at once, with the request's first chunk: others wait for it, and
    it takes device memory. A tail, and a plan that recomputes all, are computed in chunks and stay
    as they are. A plan that is changed has no seconds: price it again.
    """
    first, *rest = plan.segments or (None,)
    if first is None or first.kind != "R" or first.tokens <= most_tokens or not rest:
        return plan
    runs: list[tuple[Kind, int]] = [("R", most_tokens), ("K", first.tokens - most_tokens)]
    runs += [(segment.kind, segment.tokens) for segment in plan.segments[1:]]
    return LoadPlan(from_runs(runs), exact=plan.exact, why=f"{plan.why}; recompute is bounded")

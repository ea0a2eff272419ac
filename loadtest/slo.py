"""What a request of a load test may take, and how that was found out.

Three ways, tried in this order: limits that the user gave in seconds; the objective of `kappa.slo`
on the endpoint's own nodes (`GET /v1/nodes` reports their profiles); five times the idle TTFT that
the endpoint predicted for the request. An endpoint that reports nothing, without limits given, has
no objective, and then there is no goodput. Pure: vectors in, vectors out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kappa.cost import step_model
from kappa.hardware import NodeProfile
from kappa.model import kv_bytes_per_token
from kappa.shapes import model_shape
from kappa.slo import (
    TTFT_FLOOR_S,
    TTFT_IDLE_FACTOR,
    IdleSpeed,
    idle_tpot_s,
    idle_ttft_s,
    limits,
    median_node,
)
from loadtest.journal import Record

Basis = Literal["given", "idle", "predicted", "none"]
Floats = NDArray[np.float64]

SHARE = 0.9
"""Share of the requests that must meet the objective, unless another is given: as in DistServe
(Zhong et al., OSDI 2024)."""

BASES: Mapping[str, str] = {
    "given": "limits given",
    "idle": "TTFT within 0.5 s (times the dilation) or 5 x idle, TPOT within 3 x idle, on the "
    "endpoint's median node",
    "predicted": "TTFT within 0.5 s (times the dilation) or 5 x the load and compute seconds that "
    "the endpoint predicted; no limit on TPOT",
    "none": "no objective: the endpoint tells nothing of its nodes, and no limit was given",
}


@dataclass(frozen=True, slots=True)
class Objective:
    """How requests are judged.

    ttft_s, tpot_s: limits given, in seconds; None leaves that one unlimited, or to the endpoint's
    own objective if both are None. share: of the requests that must meet it for the run to pass;
    has_share: whether that was given, so that the endpoint's own objective must be met, too.
    speeds, dilation: of the endpoint's nodes, one entry per worker; none if not reported.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    share: float = SHARE
    speeds: tuple[IdleSpeed, ...] = ()
    dilation: float = 1.0
    has_share: bool = False

    @property
    def is_required(self) -> bool:
        """Whether the user gave any of it: a run can only miss what was required."""
        return self.has_share or self.ttft_s is not None or self.tpot_s is not None

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s"):
            value = getattr(self, name)
            if value is not None and not (np.isfinite(value) and value > 0):
                raise ValueError(f"the objective's {name} is {value}: give seconds above zero")
        if not 0 < self.share <= 1:
            raise ValueError(f"the objective's share is {self.share}: give one above 0, at most 1")

    def limits_text(self) -> str:
        """The limits that were given, in words."""
        ttft, tpot = self.ttft_s, self.tpot_s
        first = "" if ttft is None else f"first token within {ttft:g} s"
        later = "" if tpot is None else f"later tokens within {tpot:g} s each"
        return ", ".join(filter(None, (first, later)))

    def judge(self, batch: Sequence[Record], dilation: float | None = None) -> Judged:
        """Limits and idle figures of some requests; `dilation` overrides the nodes' own."""
        factor = self.dilation if dilation is None else dilation
        idle_ttft, idle_tpot = self._idle(batch)
        if self.ttft_s is not None or self.tpot_s is not None:
            ttft = np.full(len(batch), np.inf if self.ttft_s is None else self.ttft_s)
            tpot = np.full(len(batch), np.inf if self.tpot_s is None else self.tpot_s)
            return Judged(ttft, tpot, idle_ttft, _all("given", batch))
        if self.speeds:
            found = limits(idle_ttft, idle_tpot, factor)
            return Judged(found.ttft_s, found.tpot_s, idle_ttft, _all("idle", batch))
        predicted = np.array([_predicted_idle_s(record) for record in batch], dtype=np.float64)
        ttft = np.maximum(TTFT_FLOOR_S * factor, TTFT_IDLE_FACTOR * predicted)
        bases: tuple[Basis, ...] = tuple(
            "none" if unknown else "predicted" for unknown in np.isnan(predicted)
        )
        return Judged(ttft, np.full(len(batch), np.inf), predicted, bases)

    def _idle(self, batch: Sequence[Record]) -> tuple[Floats, Floats]:
        """Idle TTFT and TPOT on the median node, its reusable prefix in the host tier."""
        if not self.speeds or not batch:
            unknown = np.full(len(batch), np.nan)
            return unknown, unknown.copy()
        prompt = np.array([r.prompt_tokens or r.input_tokens for r in batch], dtype=np.float64)
        cached = np.minimum([r.cached_tokens for r in batch], np.maximum(prompt - 1, 0))
        output = np.array([r.generated_tokens or r.output_tokens for r in batch], dtype=np.float64)
        kinds = list(dict.fromkeys(self.speeds))
        counts = [self.speeds.count(kind) for kind in kinds]
        ttft = [idle_ttft_s(kind, cached, prompt - cached) for kind in kinds]
        tpot = [idle_tpot_s(kind, prompt, output) for kind in kinds]
        return median_node(ttft, counts), median_node(tpot, counts)


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """Per request: seconds allowed (NaN or inf: no limit), seconds idle (NaN: unknown), and why."""

    ttft_limit_s: Floats
    tpot_limit_s: Floats
    idle_ttft_s: Floats
    basis: tuple[Basis, ...]

    def met(self, ttft_s: Floats, tpot_s: Floats) -> NDArray[np.bool_]:
        """Which meet their limits; NaN as TTFT: no token ever came; as TPOT: a single token."""
        in_time = ~np.isnan(ttft_s) & ~(ttft_s > self.ttft_limit_s)
        return np.asarray(in_time & ~(tpot_s > self.tpot_limit_s), dtype=np.bool_)


def _all(basis: Basis, batch: Sequence[Record]) -> tuple[Basis, ...]:
    return (basis,) * len(batch)


def _predicted_idle_s(record: Record) -> float:
    predicted = record.predicted or {}
    load_s, compute_s = predicted.get("load_s"), predicted.get("compute_s")
    if load_s is None or compute_s is None:
        return float("nan")
    return float(load_s) + float(compute_s)


def objective_of(run: Mapping[str, Any]) -> Objective:
    """The objective of a run, from its `run.json`: `objective` as given, `nodes` as reported.

    Raises:
        ValueError: an objective that is none.
    """
    given = dict(run.get("objective") or {})
    unknown = sorted(set(given) - {"ttft_s", "tpot_s", "share"})
    if unknown:
        raise ValueError(f"objective: unknown key {unknown[0]!r}; known: ttft_s, tpot_s, share")
    rows = run.get("nodes") or []
    speeds = node_speeds(rows, str(run.get("model") or ""))
    return Objective(
        ttft_s=given.get("ttft_s"),
        tpot_s=given.get("tpot_s"),
        share=SHARE if given.get("share") is None else float(given["share"]),
        speeds=speeds,
        dilation=dilation_of(rows),
        has_share=given.get("share") is not None,
    )


def dilation_of(rows: Sequence[Mapping[str, Any]]) -> float:
    """Real seconds per emulated one, on the node that is slowed down most; 1 without nodes."""
    profiles = (row.get("profile") for row in rows)
    known = (profile.get("dilation") for profile in profiles if isinstance(profile, Mapping))
    return max((float(value) for value in known if isinstance(value, int | float)), default=1.0)


def node_speeds(rows: Sequence[Mapping[str, Any]], model: str) -> tuple[IdleSpeed, ...]:
    """How fast each node of `GET /v1/nodes` is when idle; empty if one of them cannot be priced.

    A paced node is priced as the model that it emulates, any other as the model served: that one's
    shape must be known by name, or nothing is known.
    """
    speeds = []
    for row in rows:
        try:
            shape = model_shape(row.get("emulated_model") or model)
            profile = NodeProfile.from_dict(row["profile"])
        except (KeyError, TypeError, ValueError):
            return ()
        load_token_s = kv_bytes_per_token(shape) / profile.h2d_bytes_per_s
        speeds.append(IdleSpeed(step_model(shape, profile), load_token_s, profile.load_fixed_s))
    return tuple(speeds)

"""The options of a load test that two runs must share to be parts of one: what is sent, and how.

They are checked before anything is sent, and kept in run.json, where a run that goes on finds them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from loadtest.client import EndpointSettings, base_url
from loadtest.cluster import Surveyed
from loadtest.datasets import open_workload
from loadtest.feeder import bounded
from loadtest.runner import DEFAULT_IN_FLIGHT, RunSettings
from workload.arrivals import ArrivalSpec, parse_arrivals
from workload.replay import (
    ENGINE_BLOCK_TOKENS,
    ReplayOptions,
    ReplaySession,
    mean_turns,
    replay_sessions,
)
from workload.shapes import Workload

DEFAULT_ARRIVALS = "poisson:1"
PROMPTS = ("auto", "ids", "text", "chat")
"""How workloads of lengths are sent: token ids, words, or words in a chat of one message."""
CHOICES = ("auto", "on", "off")
RATES = ("sessions", "requests")


def _is_factor(text: str) -> bool:
    try:
        return Fraction(text) > 0
    except (ValueError, ZeroDivisionError):
        return False


_RULES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (("prompts",), PROMPTS.__contains__, ", ".join(PROMPTS)),
    (("ignore_eos",), CHOICES.__contains__, ", ".join(CHOICES)),
    (("rates",), RATES.__contains__, ", ".join(RATES)),
    (
        ("sessions", "requests", "closed", "max_output", "max_context", "max_turns", "in_flight",
         "limit"),
        lambda value: value >= 1, "1 or more",
    ),
    (("duration", "timeout"), lambda v: math.isfinite(v) and v > 0, "seconds, above zero"),
    (("pause_factor", "retries"), lambda v: math.isfinite(v) and v >= 0, "zero or more"),
    (("scale",), _is_factor, "a factor such as 1/32 or 0.5"),
)  # fmt: skip
"""(options, what their values must satisfy, what to give instead)."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """A load test's options. None leaves out a bound; seconds and tokens as in `kappa replay`.

    `digest` tells two versions of a workload's file apart.
    """

    workload: str
    url: str
    model: str | None = None
    arrivals: str = DEFAULT_ARRIVALS
    closed: int | None = None
    rates: str = "sessions"
    sessions: int | None = None
    requests: int | None = None
    duration: float | None = None
    seed: int = 0
    prompts: str = "auto"
    ignore_eos: str = "auto"
    usage: bool = True
    max_output: int | None = None
    max_context: int | None = None
    max_turns: int | None = None
    pause_factor: float = 1.0
    retries: int = 0
    timeout: float = 300.0
    in_flight: int = DEFAULT_IN_FLIGHT
    tokenizer: str | None = None
    scale: str = "1"
    limit: int | None = None
    digest: str = ""

    def __post_init__(self) -> None:
        """Refuse what cannot be sent, with a ValueError that names the option."""
        base_url(self.url)
        self.spec()
        for names, is_usable, remedy in _RULES:
            for name in names:
                value = getattr(self, name)
                if value is not None and not is_usable(value):
                    option = name.replace("_", "-")
                    raise ValueError(f"--{option} is {value!r}: give {remedy}")

    def open(self) -> Workload:
        """The workload itself; reads its file.

        Raises:
            ValueError: there is none, or it cannot be used; says file and line.
        """
        return open_workload(
            self.workload,
            tokenizer=self.tokenizer,
            scale=Fraction(self.scale),
            # What engines share at the finest: chats then share what they really would.
            block_tokens=ENGINE_BLOCK_TOKENS,
            limit=self.limit,
        )

    def spec(self) -> ArrivalSpec:
        """The arrivals; a ValueError says what is wrong with them."""
        if self.closed is not None:
            return ArrivalSpec("closed", concurrency=self.closed, text=f"closed:{self.closed}")
        return parse_arrivals(self.arrivals)

    def endpoint(self, surveyed: Surveyed | None, keys: Mapping[str, str]) -> EndpointSettings:
        """Where and how to send; `surveyed`: None if the endpoint did not answer."""
        takes = surveyed is not None and surveyed.takes_ignore_eos
        return EndpointSettings(
            url=self.url,
            model=self.model or "",
            keys=keys,
            timeout_s=self.timeout,
            ignore_eos=self.ignore_eos == "on" or (self.ignore_eos == "auto" and takes),
            usage=self.usage,
            max_output_tokens=self.max_output,
            as_chat=self.prompts == "chat",
        )

    def run_settings(self, in_flight: int, grace_s: float) -> RunSettings:
        """When to send, with as many streams as the system allows."""
        return RunSettings(
            closed=self.spec().concurrency,
            retries=self.retries,
            in_flight=in_flight,
            duration_s=self.duration,
            grace_s=grace_s,
            seed=self.seed,
        )

    def replay(self, workload: Workload, surveyed: Surveyed | None) -> Iterator[ReplaySession]:
        """The sessions to send, in order of arrival; the workload once if nothing bounds them.

        Raises:
            ValueError: the workload has no times of its own, or nothing of it fits.
        """
        spec = self.spec()
        factor = 1.0 if self.rates == "sessions" else 1.0 / mean_turns(workload)
        reported = surveyed.contexts.get(self.model or "") if surveyed else None
        is_bounded = any(x is not None for x in (self.sessions, self.requests, self.duration))
        options = ReplayOptions(
            as_text=self._as_text(surveyed),
            max_context_tokens=reported if self.max_context is None else self.max_context,
            max_output_tokens=self.max_output,
            max_turns=self.max_turns,
            pause_factor=self.pause_factor,
            copies=None if is_bounded else 1,
            salt=self.seed,
        )
        sessions = replay_sessions(
            workload,
            arrivals=spec.times(np.random.default_rng(self.seed), rate_factor=factor),
            seed=self.seed,
            options=options,
            trace_speed=spec.speed,
        )
        return bounded(sessions, self.sessions, self.requests)

    def _as_text(self, surveyed: Surveyed | None) -> bool:
        """Whether prompts are words: engines that take vLLM's options take token ids, too."""
        if self.prompts == "auto":
            return surveyed is None or not surveyed.takes_ignore_eos
        return self.prompts != "ids"


NAMES = frozenset(f.name for f in fields(LoadOptions))


def file_digest(workload: str) -> str:
    """A digest of the workload's file, empty for one that is built in."""
    path = Path(workload)
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]

"""The options of a load test that two runs must share to be parts of one.

`kappa replay` has them as they stand here; they are kept in run.json, where a resumed run finds
them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from typer import Argument, BadParameter, Option

from kappa.protocol import MOST_PRIORITY
from kappa_loadtest.client import EndpointSettings, base_url
from kappa_loadtest.cluster import Surveyed
from kappa_loadtest.datasets import open_workload
from kappa_loadtest.runner import DEFAULT_IN_FLIGHT, RunSettings
from kappa_workload.arrivals import ArrivalSpec, parse_arrivals
from kappa_workload.replay import (
    ENGINE_BLOCK_TOKENS,
    ReplayOptions,
    ReplaySession,
    mean_turns,
    replay_sessions,
)
from kappa_workload.shapes import Workload

Choice = Literal["auto", "on", "off"]
Rates = Literal["sessions", "requests"]
Prompts = Literal["auto", "ids", "text", "chat"]
"""How workloads of lengths are sent: token ids, words, or words in a chat of one message."""


def _factor(text: str) -> str:
    try:
        if Fraction(text) > 0:
            return text
    except (ValueError, ZeroDivisionError):
        pass
    raise BadParameter(f"{text!r} is no factor such as 1/32 or 0.5")


def finite(value: float | None) -> float | None:
    """An option's value; BadParameter if it is not a finite number of seconds."""
    if value is not None and not math.isfinite(value):
        raise BadParameter(f"{value} is no number of seconds")
    return value


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """A load test's options; None: no bound."""

    workload: Annotated[
        str | None, Argument(help="A built-in workload, a file of one, hf:OWNER/NAME.")
    ] = None
    url: Annotated[str | None, Option(help="The endpoint, with or without /v1.")] = None
    model: Annotated[str | None, Option(help="Default: the first that it serves.")] = None
    arrivals: Annotated[
        str, Option(help="Sessions a second: poisson:5, gamma:5,cv=3, trace, ramp:1-9/60 …")
    ] = "poisson:1"
    closed: Annotated[
        int | None, Option(min=1, help="Sessions at a time, instead of arrivals.")
    ] = None
    rates: Annotated[Rates, Option(help="What rates count.")] = "sessions"
    sessions: Annotated[int | None, Option(min=1, help="The most sessions.")] = None
    requests: Annotated[int | None, Option(min=1, help="The most requests.")] = None
    duration: Annotated[
        float | None, Option(min=1e-9, callback=finite, help="Nothing is due after these s.")
    ] = None
    seed: Annotated[int, Option(help="Of arrivals, order and tokens.")] = 0
    prompts: Annotated[Prompts, Option(help="For workloads of lengths.")] = "auto"
    ignore_eos: Annotated[Choice, Option(help="Answers as long as requested, where it can be.")] = (
        "auto"
    )
    usage: Annotated[bool, Option(help="Ask the endpoint for token counts.")] = True
    max_output: Annotated[int | None, Option(min=1, help="Longest answer, in tokens.")] = None
    max_context: Annotated[
        int | None, Option(min=1, help="Longest prompt and answer; default: as the endpoint says.")
    ] = None
    max_turns: Annotated[int | None, Option(min=1, help="Turns of a session, at most.")] = None
    pause_factor: Annotated[
        float, Option(min=0, callback=finite, help="Multiplies pauses between turns.")
    ] = 1.0
    priority: Annotated[
        list[str] | None,
        Option(help="TENANT=CLASS, or CLASS for all others: the field priority of requests."),
    ] = None
    retries: Annotated[int, Option(min=0, help="Further attempts after what may pass.")] = 0
    timeout: Annotated[
        float, Option(min=1e-9, callback=finite, help="Seconds for a whole answer.")
    ] = 300.0
    in_flight: Annotated[int, Option(min=1, help="Streams at once, at most.")] = DEFAULT_IN_FLIGHT
    tokenizer: Annotated[
        str | None, Option(help="Measures texts: a tokenizer.json, or a model's folder.")
    ] = None
    scale: Annotated[str, Option(callback=_factor, help="Every length times this, as 1/32.")] = "1"
    limit: Annotated[int | None, Option(min=1, help="Sessions to read of the file.")] = None
    digest: str = ""  # of the workload's file, so that a resumed run notices a changed one

    def checked(self) -> LoadOptions:
        """These options with the digest of the workload's file; ValueError for missing or unusable
        ones."""
        for name, given in (("WORKLOAD", self.workload), ("--url URL", self.url)):
            if not given:
                raise ValueError(f"give {name}")
        base_url(str(self.url))
        self.spec()
        self.priorities()
        path, digest = Path(str(self.workload)), ""
        if path.is_file():
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
        return replace(self, digest=digest)

    def open(self) -> Workload:
        """Read the workload.

        Raises:
            ValueError: it does not exist or cannot be used; names file and line.
        """
        return open_workload(
            str(self.workload),
            tokenizer=self.tokenizer,
            scale=Fraction(self.scale),
            # What engines share at the finest: chats then share what they really would.
            block_tokens=ENGINE_BLOCK_TOKENS,
            limit=self.limit,
        )

    def spec(self) -> ArrivalSpec:
        """The arrivals; ValueError if they are malformed."""
        if self.closed is not None:
            return ArrivalSpec("closed", concurrency=self.closed, text=f"closed:{self.closed}")
        return parse_arrivals(self.arrivals)

    def priorities(self) -> dict[str, int]:
        """Class by tenant, with "" for all others; ValueError for a malformed one."""
        found: dict[str, int] = {}
        for given in self.priority or ():
            tenant, _, text = given.rpartition("=")
            if not (text.isascii() and text.isdigit() and int(text) <= MOST_PRIORITY):
                raise ValueError(
                    f"--priority {given!r}: give TENANT=CLASS or CLASS, a class from 0, which goes "
                    f"first, to {MOST_PRIORITY}"
                )
            if tenant in found:
                raise ValueError(f"--priority gives {tenant or 'all others'} two classes: drop one")
            found[tenant] = int(text)
        return found

    def endpoint(self, surveyed: Surveyed | None, keys: Mapping[str, str]) -> EndpointSettings:
        """Settings of the client; `surveyed` is None if the endpoint did not answer."""
        takes = surveyed is not None and surveyed.takes_ignore_eos
        return EndpointSettings(
            url=str(self.url),
            model=self.model or "",
            keys=keys,
            priorities=self.priorities(),
            timeout_s=self.timeout,
            ignore_eos=self.ignore_eos == "on" or (self.ignore_eos == "auto" and takes),
            usage=self.usage,
            max_output_tokens=self.max_output,
            as_chat=self.prompts == "chat",
        )

    def run_settings(self, in_flight: int, grace_s: float) -> RunSettings:
        """Settings of the runner, with at most `in_flight` streams."""
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
            ValueError: the workload has no times of its own, or no request fits.
        """
        spec = self.spec()
        factor = 1.0 if self.rates == "sessions" else 1.0 / mean_turns(workload)
        reported = surveyed.contexts.get(self.model or "") if surveyed else None
        is_bounded = any(x is not None for x in (self.sessions, self.requests, self.duration))
        # Engines that take vLLM's options take token ids, too.
        takes_ids = surveyed is not None and surveyed.takes_ignore_eos
        options = ReplayOptions(
            as_text=not takes_ids if self.prompts == "auto" else self.prompts != "ids",
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


def bounded(
    sessions: Iterator[ReplaySession], most_sessions: int | None, most_requests: int | None
) -> Iterator[ReplaySession]:
    """The first sessions, up to both bounds; the last session may be cut short."""
    left = most_requests
    for session in islice(sessions, most_sessions):
        if left is None:
            yield session
            continue
        requests = session.requests[:left]
        left -= len(requests)
        yield replace(session, requests=requests)
        if not left:
            return

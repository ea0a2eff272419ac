"""The journal of a rollout: each decision and what became of it, as JSON lines, and the way back.

A `workers` line says what each engine is and what was learnt of it; it comes first and again when
more has been learnt. A `request` line comes when a request has ended. No prompt is in it: its
blocks are hashes under a secret that the process drew, those that a line shares with an earlier one
are given by that line's number. Pure: it makes and reads dictionaries, files are others'.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from kappa.cost import StepModel
from kappa.protocol import Announcement
from router.engine_queue import EngineSpeed
from router.index.prefix_hash import UInt64s
from router.router import Router

Entry = dict[str, Any]

CacheBlocks = dict[str, int]
"""`device_blocks` and `host_blocks` of an engine."""

VERSION = 1
MOST_REQUESTS = 50_000
"""Of a segment, the latest."""
_REMEMBERED = 4096  # prompts whose beginnings a later line may refer to


@dataclass(frozen=True, slots=True)
class JournaledWorker:
    """An engine as the router knew it; overhead_s: of a request besides the engine."""

    announcement: Announcement
    speed: EngineSpeed
    overhead_s: float


@dataclass(frozen=True, slots=True)
class JournaledRequest:
    """A request that was served; real seconds. ttft_s: NaN if its answer was not streamed.

    steered: the arm, `kappa` or `present`. blocks: hashes of the prompt's leading blocks, shape
    (blocks,). predicted_s: the TTFT expected where it went, NaN if nothing was.
    """

    conversation: str
    arrival_s: float
    ttft_s: float
    end_s: float
    worker: str
    steered: str
    prompt_tokens: int
    output_tokens: int
    blocks: UInt64s
    predicted_s: float = math.nan


@dataclass(slots=True)
class RolloutSegment:
    """What one process wrote: mode and present rule at its start, engines as last known, the latest
    requests in the order of their ends. failed: requests that had no answer."""

    mode: str
    present: str
    policy: str
    workers: dict[str, JournaledWorker] = field(default_factory=dict)
    requests: deque[JournaledRequest] = field(default_factory=lambda: deque(maxlen=MOST_REQUESTS))
    failed: int = 0


class JournalWriter:
    """Makes the lines of one process, in the order in which they are to be written."""

    def __init__(self, mode: str, present: str, policy: str) -> None:
        self._start = {"mode": mode, "present": present, "policy": policy}
        self._salt = hashlib.blake2b(repr(self._start).encode(), digest_size=8).digest()
        self._number, self._begun = 0, False
        # The line in which a block came first, by its hash.
        self._lines: OrderedDict[int, UInt64s] = OrderedDict()
        self._first: dict[int, int] = {}

    def workers(
        self, router: Router, time_s: float, caches: Mapping[str, CacheBlocks] | None = None
    ) -> Entry:
        """What is known of the engines now; caches: of those whose size was learnt, by name."""
        learnt = caches or {}
        known = [
            {
                "announcement": state.announcement.to_dict() | learnt.get(name, {}),
                "speed": asdict(state.calibration.speed),
                "overhead_s": state.calibration.overhead_s,
            }
            for name, state in router.workers.items()
        ]
        first, self._begun = not self._begun, True
        return {"line": "workers", "version": VERSION, "time_s": time_s, "first": first,
                **self._start, "workers": known}  # fmt: skip

    def request(self, record: Mapping[str, Any], conversation: str, blocks: UInt64s) -> Entry:
        """The line of a request that has ended.

        Args:
            record: `DecisionRecord.to_dict()`, with worker, prompt_tokens, output_tokens and end_s.
            conversation: its name, which is written as a digest.
            blocks: hashes of the prompt's leading blocks.
        """
        named = conversation.encode(errors="surrogatepass")
        return {
            "line": "request", **record,
            "conversation": hashlib.blake2b(named, digest_size=8, salt=self._salt).hexdigest(),
            **self._packed(blocks),
        }  # fmt: skip

    def forget(self) -> None:
        """A line was lost: none that follows may refer to those before."""
        self._lines.clear()
        self._first.clear()

    def _packed(self, blocks: UInt64s) -> Entry:
        number, names = self._number, blocks.tolist()
        self._number += 1
        shared = next((i for i, name in enumerate(names) if name not in self._first), len(names))
        base = self._first[names[shared - 1]] if shared else None
        self._lines[number] = blocks
        for name in names[shared:]:
            self._first[name] = number
        if len(self._lines) > _REMEMBERED:
            old, gone = self._lines.popitem(last=False)
            for name in gone.tolist():
                if self._first.get(name) == old:
                    del self._first[name]
        rest = base64.b64encode(blocks[shared:].astype("<u8").tobytes()).decode()
        return {"number": number, "like": base, "shared_blocks": shared, "blocks": rest}


def read_journal(entries: Iterable[tuple[str, Mapping[str, Any]]]) -> list[RolloutSegment]:
    """The segments of a journal, from (where, entry).

    Requests without an answer are counted, not kept.

    Raises:
        ValueError: names the line that cannot be read.
    """
    segments: list[RolloutSegment] = []
    prompts: dict[int, UInt64s] = {}
    for where, entry in entries:
        try:
            if entry["line"] == "workers":
                begun = (entry["mode"], entry["present"], entry["policy"])
                if entry["version"] != VERSION:
                    raise ValueError(f"version {entry['version']}, this program reads {VERSION}")
                if not segments or entry["first"]:
                    segments.append(RolloutSegment(*begun))
                    prompts = {}
                segments[-1].workers.update(_workers(entry["workers"]))
            elif not segments:
                raise ValueError("a request before any line of the workers")
            else:
                _add_request(segments[-1], entry, prompts)
        except (KeyError, TypeError, ValueError) as error:
            what = f"no key {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"{where}: not a line of a journal ({what})") from None
    return segments


def _workers(rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, JournaledWorker]]:
    for row in rows:
        announcement = Announcement.from_dict(row["announcement"])
        speed = dict(row["speed"])
        speed |= {
            "step": StepModel(**speed["step"]), "factors": tuple(speed["factors"]),
        }  # fmt: skip
        yield (
            announcement.worker,
            JournaledWorker(announcement, EngineSpeed(**speed), row["overhead_s"]),
        )


def _add_request(
    segment: RolloutSegment, entry: Mapping[str, Any], prompts: dict[int, UInt64s]
) -> None:
    rest = np.frombuffer(base64.b64decode(entry["blocks"]), dtype="<u8").astype(np.uint64)
    shared = (
        prompts[entry["like"]][: entry["shared_blocks"]] if entry["shared_blocks"] else rest[:0]
    )
    blocks = np.concatenate([shared, rest])
    if len(shared) < entry["shared_blocks"]:
        raise ValueError(f"shares {entry['shared_blocks']} blocks with a prompt of {len(shared)}")
    prompts[entry["number"]] = blocks
    prompts.pop(entry["number"] - 2 * _REMEMBERED, None)
    ttft_s = math.nan if entry["actual"]["ttft_s"] is None else entry["actual"]["ttft_s"]
    if entry["end"] != "done":
        segment.failed += 1
        return
    segment.requests.append(
        JournaledRequest(
            entry["conversation"], entry["time_s"], ttft_s, entry["end_s"], entry["worker"],
            entry["steered"], entry["prompt_tokens"], max(entry["output_tokens"], 1), blocks,
            entry["predicted"]["ttft_s"],
        )
    )  # fmt: skip

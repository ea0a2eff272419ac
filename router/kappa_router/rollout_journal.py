"""The journal of a rollout: decisions with their outcomes as JSON lines, written and read.

A `workers` line describes each engine and its learnt constants; it comes first, and again when
more was learnt. A `request` line comes when a request has ended: its record, without its
prompt. Of that it has hashes of the blocks, under a secret that the process drew, as far as no
earlier line has them. Pure: files are others'.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from kappa.protocol import Announcement
from kappa_router.engine_fit import EngineSpeed
from kappa_router.index.prefix_hash import UInt64s
from kappa_router.router import Router

Entry = dict[str, Any]

CacheBlocks = dict[str, Any]  # int
"""`device_blocks` and `host_blocks` of an engine."""

VERSION = 2
MOST_REQUESTS = 50_000
"""Of a segment, the latest."""
_DESCRIBE_S = 30.0
_REMEMBERED = 1 << 18  # blocks to which a later line may refer


@dataclass(frozen=True, slots=True)
class JournaledWorker:
    """An engine as the router knew it."""

    announcement: Announcement
    speed: EngineSpeed
    # Of a request besides the engine.
    overhead_s: float


@dataclass(frozen=True, slots=True)
class JournaledRequest:
    """A request that was served; real seconds."""

    conversation: str
    arrival_s: float
    # NaN if its answer was not streamed.
    ttft_s: float
    end_s: float
    worker: str
    # The arm, `kappa` or `present`.
    steered: str
    prompt_tokens: int
    output_tokens: int
    # Hashes of the prompt's leading blocks, shape (blocks,).
    blocks: UInt64s
    # The TTFT predicted where it went; NaN: none was.
    predicted_s: float = math.nan


@dataclass(slots=True)
class RolloutSegment:
    """The lines of one process: mode and present rule at its start, engines as last known, the
    latest requests in the order of their ends."""

    mode: str
    present: str
    policy: str
    workers: dict[str, JournaledWorker] = field(default_factory=dict)
    requests: deque[JournaledRequest] = field(default_factory=lambda: deque(maxlen=MOST_REQUESTS))
    # Requests that had no answer.
    failed: int = 0


class _SeenBlocks(OrderedDict[int, UInt64s | None]):
    """Blocks that lines so far have, the latest; the reader keeps a prompt that each stands in.

    Writer and reader see the same lines and so remember the same blocks. Of a prompt's blocks each
    is the hash of all up to it: one that is known tells those before it.
    """

    def add(self, names: Iterable[int], prompt: UInt64s | None = None) -> None:
        for name in names:
            self[name] = prompt
        while len(self) > _REMEMBERED:
            self.popitem(last=False)


class JournalWriter:
    """Writes down what one process does, line by line.

    Args:
        mode, present, policy: as the process was started with.
        router: the one that knows the engines to describe.
        caches: learnt sizes of caches, by engine.
        write: takes each line.
    """

    def __init__(
        self,
        mode: str,
        present: str,
        policy: str,
        router: Router,
        caches: Callable[[], Mapping[str, CacheBlocks]],
        write: Callable[[Entry], None],
    ) -> None:
        self._start = {"mode": mode, "present": present, "policy": policy}
        self._router, self._caches, self._write = router, caches, write
        self._salt = hashlib.blake2b(repr(self._start).encode(), digest_size=8).digest()
        self._described_s, self._described, self._seen = -math.inf, 0, _SeenBlocks()

    def describe(self, now_s: float) -> None:
        """Write a `workers` line: all engines as they are known now."""
        workers, learnt = self._router.workers, self._caches()
        known = [
            JournaledWorker(
                replace(state.announcement, **learnt.get(name, {})),
                state.calibration.speed,
                state.calibration.overhead_s,
            )
            for name, state in workers.items()
        ]
        first = self._described_s == -math.inf
        about = {"line": "workers", "version": VERSION, "time_s": now_s, "first": first}
        self._write({**about, **self._start, "workers": msgspec.to_builtins(known, enc_hook=float)})
        self._described_s, self._described = now_s, len(workers)

    def ended(self, record: Mapping[str, Any], conversation: str, blocks: UInt64s) -> None:
        """A request has ended.

        Args:
            record: `DecisionRecord.to_dict()`, with worker, prompt_tokens, output_tokens and end_s.
            conversation: its name, which is written as a digest.
            blocks: hashes of the prompt's leading blocks.
        """
        now_s = record["end_s"]
        if now_s - self._described_s > _DESCRIBE_S or len(self._router.workers) > self._described:
            self.describe(now_s)
        named = conversation.encode(errors="surrogatepass")
        names = blocks.tolist()
        new = next((i for i, name in enumerate(names) if name not in self._seen), len(names))
        self._seen.add(names[new:])
        shared = max(new - 1, 0)  # and the first that is given, by which the reader finds them
        line = {
            "line": "request",
            **record,
            "conversation": hashlib.blake2b(named, digest_size=8, salt=self._salt).hexdigest(),
            "shared_blocks": shared,
            "blocks": base64.b64encode(blocks[shared:].astype("<u8").tobytes()).decode(),
        }
        self._write(line)


def read_journal(lines: Iterable[str], where: str) -> list[RolloutSegment]:
    """The segments of a journal; where: its name, for errors.

    Requests without an answer are counted, not kept. A last line that is being written is left out.

    Raises:
        ValueError: names the line that cannot be read.
    """
    segments: list[RolloutSegment] = []
    seen, cut = _SeenBlocks(), ""
    for number, line in enumerate(lines, start=1):
        if cut:
            raise ValueError(f"{cut}: not JSON; remove the line")
        try:
            entry = json.loads(line)
            if entry["line"] == "workers":
                if entry["version"] != VERSION:
                    raise ValueError(
                        f"it has version {entry['version']}, this program reads {VERSION}: report "
                        "with the kappa-serve that wrote it, or begin another journal"
                    )
                if not segments or entry["first"]:
                    begun = (entry["mode"], entry["present"], entry["policy"])
                    segments.append(RolloutSegment(*begun))
                    seen = _SeenBlocks()
                known = msgspec.convert(entry["workers"], list[JournaledWorker])
                segments[-1].workers.update({one.announcement.worker: one for one in known})
            elif not segments:
                raise ValueError("a request before any line of the workers")
            else:
                _add_request(segments[-1], entry, _blocks(entry, seen))
        except json.JSONDecodeError:
            cut = f"{where}:{number}"
        except (KeyError, TypeError, ValueError, msgspec.ValidationError) as error:
            what = f"no key {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"{where}:{number}: not a line of a journal ({what})") from None
    return segments


def _blocks(entry: Entry, seen: _SeenBlocks) -> UInt64s:
    given = np.frombuffer(base64.b64decode(entry["blocks"]), dtype="<u8").astype(np.uint64)
    shared, names = entry["shared_blocks"], given.tolist()
    if shared:
        prompt = seen.get(names[0])
        if prompt is None or len(prompt) <= shared:
            raise ValueError("it refers to blocks that no line before it has")
        given = np.concatenate([prompt[:shared], given])
    seen.add((name for name in names if name not in seen), given)
    return given


def _add_request(segment: RolloutSegment, entry: Entry, blocks: UInt64s) -> None:
    if entry["end"] != "done":
        segment.failed += 1
        return
    ttft_s = math.nan if entry["actual"]["ttft_s"] is None else entry["actual"]["ttft_s"]
    request = JournaledRequest(
        conversation=entry["conversation"],
        arrival_s=entry["time_s"],
        ttft_s=ttft_s,
        end_s=entry["end_s"],
        worker=entry["worker"],
        steered=entry["steered"],
        prompt_tokens=entry["prompt_tokens"],
        output_tokens=max(entry["output_tokens"], 1),
        blocks=blocks,
        predicted_s=entry["predicted"]["ttft_s"],
    )
    segment.requests.append(request)

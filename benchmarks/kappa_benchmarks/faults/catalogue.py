"""The faults by name: how each is done and healed, and the guarantee while it lasts.

One list for the command line, the tests and the runbook. A guarantee bounds the clients' losses and
the cluster's own figures; `kappa_benchmarks.faults.trial` compares them with it. Every wait has a
bound.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from kappa_benchmarks.faults.cluster import FaultsError, Target, alive, kill, send

_SHOW_S = 30.0
_END_S = 60.0
_HOUR_S = 3600.0
_CORRUPT = (
    "null", "[]", "{", '{"device": "cpu"}',
    '{"device": "cpu", "h2d_bytes_per_s": NaN, "d2h_bytes_per_s": -1, "hbm_bytes_per_s": 1e400,'
    ' "flops_per_s": "fast"}',
)  # fmt: skip


@dataclass(slots=True)
class Action:
    """One try."""

    do: Callable[[], object]
    heal: Callable[[], object] = lambda: None
    # Whether the fault's effect was seen; None: it has none that must be.
    shown: Callable[[], bool | None] = lambda: None
    # Of the worker that is killed or impaired, if one is.
    node: str = ""


@dataclass(frozen=True, slots=True)
class Victim:
    """A worker chosen for one try; `turn` also chooses a corruption."""

    target: Target
    row: dict[str, Any]
    turn: int

    @property
    def worker(self) -> str:
        return str(self.row["worker"])

    @property
    def node(self) -> str:
        return str(self.row["node"])

    def pid(self) -> int:
        return self.target.pid(self.worker)

    def of_role(self, role: str) -> list[int]:
        """Pids of the cluster's processes of a role; FaultsError where there is none."""
        pids = self.target.family.of_role(role)
        if not pids:
            raise FaultsError(f"no process of the {role} was found: was the cluster started here?")
        return pids

    def total(self, name: str) -> float:
        """A running total of the worker's report; its node may get another name as ranks change."""
        row = self.target.row("worker", self.worker)
        return float(((row or {}).get("totals") or {}).get(name, 0))

    def soon(self, question: Callable[[], object], patience_s: float = _SHOW_S) -> bool:
        return bool(self.target.until(question, patience_s))

    def risen(self, name: str) -> Callable[[], bool]:
        """Whether, soon, more is counted than now."""
        before = self.total(name)
        return lambda: self.soon(lambda: self.total(name) > before)

    def chosen(self) -> bool:
        """Whether, soon, requests go there (by this machine's clock)."""
        since_s = time.time() - 5.0

        def found() -> bool:
            decisions = self.target.decisions()
            return any(d["node"] == self.node and d["time_s"] >= since_s for d in decisions)

        return self.soon(found)


# -- processes ------------------------------------------------------------------------------------


def _kill_worker(v: Victim) -> Action:
    pid = v.pid()
    below = v.target.family.below(pid)

    def gone() -> bool:
        return v.soon(lambda: not any(map(alive, below)))

    return Action(lambda: kill([pid]), shown=gone if below else lambda: None, node=v.node)


def _kill_engine(v: Victim) -> Action:
    engines = set(v.target.family.of_role("engine"))
    below = [pid for pid in v.target.family.below(v.pid()) if pid in engines]
    if not below:
        raise FaultsError(f"worker {v.worker} has no engine process of its own")
    return Action(lambda: kill(below[:1]), node=v.node)


def _freeze_worker(v: Victim) -> Action:
    pid = v.pid()
    return Action(
        lambda: send(signal.SIGSTOP, [pid]), lambda: send(signal.SIGCONT, [pid]), v.chosen, v.node
    )


def _kill_decider(v: Victim) -> Action:
    pids, before = v.of_role("decider"), v.target.metric("kappa_index_blocks")

    def filled() -> bool:
        # The load goes on, so the index differs a little from what it was.
        return v.soon(lambda: v.target.metric("kappa_index_blocks") > before / 2)

    return Action(lambda: kill(pids[:1]), shown=filled)


def _kill_role(role: str, most: int | None = None) -> Callable[[Victim], Action]:
    """Kill a role's processes, at most `most`; others must come."""

    def make(v: Victim) -> Action:
        pids = v.of_role(role)

        def another() -> bool:
            now = v.target.family.of_role(role)
            return bool(now) and now != pids

        return Action(lambda: kill(pids[:most]), shown=lambda: v.soon(another))

    return make


def _kill_head(v: Victim) -> Action:
    pids, family = v.of_role("gcs"), v.target.family
    return Action(lambda: kill(pids), shown=lambda: v.soon(lambda: not family.survivors(), _END_S))


# -- emulated engines -----------------------------------------------------------------------------


def _engine_fault(v: Victim, fault: dict[str, Any], shown: Callable[[], bool | None]) -> Action:
    return Action(
        lambda: v.target.set_engine_faults({v.worker: fault}),
        lambda: v.target.set_engine_faults({}), shown, v.node,
    )  # fmt: skip


def _slow_link(v: Victim) -> Action:
    before = v.total("load_tokens_total")

    def risen() -> bool | None:
        row = v.target.row("worker", v.worker)
        if row is None:
            return False
        # Without a load since then there is nothing to be seen.
        loaded = v.total("load_tokens_total") != before
        return bool(row["calibration"]["link_scale"] > 1.5) if loaded else None

    # Healthy loads are learnt as fast as slow ones, so it is looked at before it is healed.
    slow = _engine_fault(v, {"link_slower": 10.0}, risen)
    seen: list[bool | None] = []

    def heal() -> None:
        seen.append(risen())
        slow.heal()

    return replace(slow, heal=heal, shown=lambda: seen[-1])


def _loads_fail(v: Victim) -> Action:
    return _engine_fault(v, {"loads_fail": True}, v.risen("failed_loads_total"))


def _hang(v: Victim) -> Action:
    return _engine_fault(v, {"hangs": True}, v.chosen)


def _events(kind: str) -> Callable[[Victim], Action]:
    def make(v: Victim) -> Action:
        # A batch that comes twice need not be noticed, only not be believed twice.
        noticed = v.risen("event_gaps_total") if kind != "repeat" else lambda: None
        return _engine_fault(v, {"events": kind}, noticed)

    return make


# -- clocks, disks, files -------------------------------------------------------------------------


def _process_fault(v: Victim, fault: dict[str, Any], shown: Callable[[], bool]) -> Action:
    return Action(
        lambda: v.target.set_process_faults(fault), lambda: v.target.set_process_faults({}), shown
    )


def _worker_clock(seconds: float) -> Callable[[Victim], Action]:
    return lambda v: _process_fault(v, {"clock": {str(v.pid()): seconds}}, v.chosen)


def _decider_clock(seconds: float) -> Callable[[Victim], Action]:
    def make(v: Victim) -> Action:
        pid, nodes = v.of_role("decider")[0], {str(row["node"]) for row in v.target.nodes()}

        def all_chosen() -> bool:
            return {d["node"] for d in v.target.decisions(limit=100)} >= nodes

        return _process_fault(v, {"clock": {str(pid): seconds}}, lambda: v.soon(all_chosen))

    return make


def _full_disk(v: Victim) -> Action:
    killing, home = _kill_worker(v), v.target.home

    def do() -> None:
        shutil.rmtree(home / "profiles", ignore_errors=True)
        v.target.set_process_faults({"full": [str(home)]})
        time.sleep(0.5)
        killing.do()

    return Action(do, lambda: v.target.set_process_faults({}), killing.shown, v.node)


def _corrupted_profile(v: Victim) -> Action:
    killing, profile = _kill_worker(v), v.row["profile"]
    kept: dict[Path, bytes] = {}

    def do() -> None:
        for path in (v.target.home / "profiles").glob("*.json"):
            kept[path] = path.read_bytes()
            path.write_text(_CORRUPT[v.turn % len(_CORRUPT)])
        killing.do()

    def heal() -> None:
        for path, content in kept.items():
            path.write_bytes(content)

    def same() -> bool:
        now = v.target.row("node", v.node)
        return now is not None and now["profile"] == profile

    return Action(do, heal, same, v.node)


# -- the list -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault and its guarantee."""

    name: str
    # The deed, in words.
    title: str
    # Its action, for a victim.
    make: Callable[[Victim], Action]
    # Of the cluster that it is tried on.
    engine: Literal["emulated", "vllm"] = "emulated"
    # Before it is healed; 0: nothing has to be healed.
    lasts_s: float = 0.0
    # Requests that were open at that moment may fail: their one way to the client is gone.
    may_lose_open: bool = False
    # Errors, as `Observed.error` has them, that clients may see until the killed process is back;
    # all other requests must be answered.
    may_refuse: tuple[str, ...] = ()
    # Within this, some request that is sent after it gets its first token; None: no such bound.
    first_answer_s: float | None = None
    # A killed worker must be back within its own start time and `recovery_extra_s`.
    recovers: bool = False
    recovery_extra_s: float = 5.0
    # Nothing serves afterwards: tried last.
    ends_cluster: bool = False
    # The effect that must be seen, in words.
    shows: str = ""

    def action(self, target: Target, turn: int) -> Action:
        """The action for one try; `turn` chooses the victim.

        Raises:
            FaultsError: the cluster is not one that it can be tried on.
        """
        rows = sorted(target.nodes(), key=lambda row: str(row["node"]))
        if not rows:
            raise FaultsError("no worker is there")
        row = rows[turn % len(rows)]
        if self.engine == "emulated" and row["engine"] != "emulated":
            raise FaultsError(f"{self.name} needs engines of kind emulated, not {row['engine']}")
        return self.make(Victim(target, row, turn))


_EXACT = "afterwards predictions of cached tokens are exact"
_STILL_CHOSEN = "the worker goes on being chosen"
_ALL_CHOSEN = "all workers are chosen again within a second"
FAULTS: tuple[Fault, ...] = (
    Fault("worker_killed", "kill -9 of a worker's process", _kill_worker, first_answer_s=1.0,
          recovers=True),
    Fault("worker_stalled", "SIGSTOP of a worker's process, SIGCONT after a while", _freeze_worker,
          lasts_s=20.0, first_answer_s=1.0,
          shows="others answer meanwhile; it serves again, or its successor does"),
    Fault("engine_hung", "no step of an engine ends, for a while", _hang, lasts_s=20.0,
          first_answer_s=1.0, shows="others answer meanwhile; it serves again"),
    Fault("decider_killed", "kill -9 of the decider", _kill_decider,
          may_refuse=("503 decider_away",),
          shows="a new decider answers, and its index is filled from the workers' snapshots"),
    Fault("envoy_killed", "kill -9 of Envoy", _kill_role("envoy"), may_lose_open=True,
          may_refuse=("ClientConnectorError",), shows="another is there"),
    Fault("controller_killed", "kill -9 of Ray Serve's controller", _kill_role("controller", 1),
          shows="a new one is there"),
    Fault("slow_link", "a node's loads last ten times as long", _slow_link, lasts_s=25.0,
          shows="the node's link scale rises in /v1/nodes"),
    Fault("loads_fail", "no load from a node's host tier arrives", _loads_fail, lasts_s=15.0,
          shows="failed loads are counted; their prompts are computed"),
    Fault("events_lost", "every second batch of KV events of a node is lost", _events("lose"),
          lasts_s=10.0, shows=f"gaps are counted; {_EXACT}"),
    Fault("events_repeated", "every second batch of KV events comes twice", _events("repeat"),
          lasts_s=10.0, shows=_EXACT),
    Fault("events_reordered", "every second batch of KV events comes after the next",
          _events("reorder"), lasts_s=10.0, shows=_EXACT),
    Fault("worker_clock_forward", "a worker's clock jumps an hour ahead", _worker_clock(_HOUR_S),
          lasts_s=10.0, shows=_STILL_CHOSEN),
    Fault("worker_clock_back", "a worker's clock jumps an hour back", _worker_clock(-_HOUR_S),
          lasts_s=10.0, shows=_STILL_CHOSEN),
    Fault("decider_clock_forward", "the decider's clock jumps an hour ahead",
          _decider_clock(_HOUR_S), lasts_s=10.0, shows=_ALL_CHOSEN),
    Fault("decider_clock_back", "the decider's clock jumps an hour back", _decider_clock(-_HOUR_S),
          lasts_s=10.0, shows=_ALL_CHOSEN),
    Fault("disk_full", "no file below the cache folder can be written, then a worker restarts",
          _full_disk, recovers=True, recovery_extra_s=10.0, shows="the worker joins and serves"),
    Fault("poisoned_profile", "the cached profile is nonsense, then a worker restarts",
          _corrupted_profile, recovers=True, recovery_extra_s=10.0,
          shows="the worker joins with the profile it had"),
    Fault("ray_head_killed", "kill -9 of Ray's GCS, without which there is no cluster", _kill_head,
          ends_cluster=True, shows="`kappa serve` ends, and nothing that it started is left"),
    Fault("engine_killed", "kill -9 of a vLLM engine's process", _kill_engine, "vllm",
          first_answer_s=1.0, recovers=True),
    Fault("vllm_worker_killed", "kill -9 of a vLLM worker's process", _kill_worker, "vllm",
          first_answer_s=1.0, recovers=True, shows="its engine's processes are gone, too"),
)  # fmt: skip


def fault_named(name: str) -> Fault:
    """A fault by its name.

    Raises:
        ValueError: there is none; names all.
    """
    for fault in FAULTS:
        if fault.name == name:
            return fault
    raise ValueError(f"no fault {name!r}: there are {', '.join(f.name for f in FAULTS)}")

"""How each fault of the catalogue is done to a cluster, healed, and what must be seen of it.

An action is made for one try: it picks its victim when it is made, does its deed, heals it if there
is something to heal, and reports what it saw. Nothing is waited for without a bound.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults.catalogue import Fault
from benchmarks.faults.processes import alive, freeze, kill, thaw
from benchmarks.faults.target import FaultsError, Target

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
    """One try. victim: the worker that is killed or impaired, if one is; node: its name."""

    do: Callable[[], None]
    heal: Callable[[], None] = lambda: None
    shown: Callable[[], bool | None] = lambda: None
    victim: str = ""
    node: str = ""


def action_for(fault: Fault, target: Target, turn: int = 0) -> Action:
    """The action of a fault; `turn` chooses the victim, and the corruption.

    Raises:
        FaultsError: the cluster is not one that it can be tried on.
    """
    rows = sorted(target.nodes(), key=lambda row: str(row["node"]))
    if not rows:
        raise FaultsError("no worker is there")
    row = rows[turn % len(rows)]
    if fault.engine == "emulated" and row["engine"] != "emulated":
        raise FaultsError(f"{fault.name} needs engines of kind emulated, not {row['engine']}")
    return _MAKERS[fault.name](target, row, turn)


# -- processes ------------------------------------------------------------------------------------


def _kill_worker(target: Target, row: dict[str, Any], turn: int) -> Action:
    worker = str(row["worker"])
    pid = target.pid(worker)
    below = target.family.below(pid)

    def gone() -> bool:
        return target.until(lambda: not any(map(alive, below)), _SHOW_S) is not None

    return Action(
        lambda: kill([pid]), shown=gone if below else lambda: None,
        victim=worker, node=str(row["node"]),
    )  # fmt: skip


def _kill_engine(target: Target, row: dict[str, Any], turn: int) -> Action:
    worker = str(row["worker"])
    below = target.family.below(target.pid(worker))
    if not below:
        raise FaultsError(f"worker {worker} has no engine process of its own")
    return Action(lambda: kill(below[:1]), victim=worker, node=str(row["node"]))


def _freeze_worker(target: Target, row: dict[str, Any], turn: int) -> Action:
    worker, node = str(row["worker"]), str(row["node"])
    pid = target.pid(worker)

    def serves() -> bool:
        recent_s = time.time() - 5.0
        return target.until(lambda: _chosen(target, node, recent_s), _SHOW_S) is True

    return Action(lambda: freeze(pid), lambda: thaw(pid), serves, node=node)


def _kill_ingress(target: Target, row: dict[str, Any], turn: int) -> Action:
    pids = target.family.of_role("ingress")
    if not pids:
        raise FaultsError("no process of the ingress was found")
    before = target.metric("kappa_index_blocks")

    def filled() -> bool:
        def enough() -> bool:
            # The load goes on, so the index differs a little from what it was.
            return target.metric("kappa_index_blocks") > before / 2

        return target.until(enough, _SHOW_S) is True

    return Action(lambda: kill(pids[:1]), shown=filled)


def _kill_controller(target: Target, row: dict[str, Any], turn: int) -> Action:
    pids = target.family.of_role("controller")
    if not pids:
        raise FaultsError("no process of Serve's controller was found")

    def another() -> bool:
        def there() -> bool:
            now = target.family.of_role("controller")
            return bool(now) and now != pids

        return target.until(there, _SHOW_S) is True

    return Action(lambda: kill(pids[:1]), shown=another)


def _kill_head(target: Target, row: dict[str, Any], turn: int) -> Action:
    pids = target.family.of_role("gcs")
    if not pids:
        raise FaultsError("no process of Ray's GCS was found: the cluster was joined, not started")
    return Action(
        lambda: kill(pids),
        shown=lambda: target.until(lambda: not target.family.survivors(), _END_S) is True,
    )


# -- emulated engines -----------------------------------------------------------------------------


def _slow_link(target: Target, row: dict[str, Any], turn: int) -> Action:
    node, worker = str(row["node"]), str(row["worker"])
    loaded = [0.0]

    def do() -> None:
        loaded[0] = _total(target, worker, "load_tokens_total")
        target.set_engine_faults({worker: {"link_slower": 10.0}})

    def risen() -> bool | None:
        now = target.worker(worker)
        if now is None or _total(target, worker, "load_tokens_total") == loaded[0]:
            return None if now is not None else False
        return bool(now["calibration"]["link_scale"] > 1.5)

    return Action(do, lambda: target.set_engine_faults({}), risen, node=node)


def _loads_fail(target: Target, row: dict[str, Any], turn: int) -> Action:
    node, worker = str(row["node"]), str(row["worker"])
    return Action(
        lambda: target.set_engine_faults({worker: {"loads_fail": True}}),
        lambda: target.set_engine_faults({}), _risen(target, worker, "failed_loads_total"),
        node=node,
    )  # fmt: skip


def _events(kind: str) -> Callable[[Target, dict[str, Any], int], Action]:
    def make(target: Target, row: dict[str, Any], turn: int) -> Action:
        node, worker = str(row["node"]), str(row["worker"])
        noticed = _risen(target, worker, "event_gaps_total")
        return Action(
            lambda: target.set_engine_faults({worker: {"events": kind}}),
            lambda: target.set_engine_faults({}),
            # A batch that comes twice need not be noticed, only not be believed twice.
            noticed if kind != "repeat" else lambda: None, node=node,
        )  # fmt: skip

    return make


# -- clocks, disks, files -------------------------------------------------------------------------


def _worker_clock(seconds: float) -> Callable[[Target, dict[str, Any], int], Action]:
    def make(target: Target, row: dict[str, Any], turn: int) -> Action:
        node, pid = str(row["node"]), target.pid(str(row["worker"]))
        return _clock(target, pid, seconds, lambda: _chosen(target, node, time.time() - 5.0), node)

    return make


def _ingress_clock(seconds: float) -> Callable[[Target, dict[str, Any], int], Action]:
    def make(target: Target, row: dict[str, Any], turn: int) -> Action:
        pids = target.family.of_role("ingress")
        if not pids:
            raise FaultsError("no process of the ingress was found")
        names = {str(row["node"]) for row in target.nodes()}

        def all_chosen() -> bool:
            return {d["node"] for d in target.decisions(limit=100)} >= names

        return _clock(target, pids[0], seconds, all_chosen)

    return make


def _clock(
    target: Target, pid: int, seconds: float, seen: Callable[[], bool], node: str = ""
) -> Action:
    def shown() -> bool:
        return target.until(seen, _SHOW_S) is True

    return Action(
        lambda: target.set_process_faults({"clock": {str(pid): seconds}}),
        lambda: target.set_process_faults({}), shown, node=node,
    )  # fmt: skip


def _full_disk(target: Target, row: dict[str, Any], turn: int) -> Action:
    action = _kill_worker(target, row, turn)
    kill_it = action.do

    def do() -> None:
        shutil.rmtree(target.home / "profiles", ignore_errors=True)
        target.set_process_faults({"full": [str(target.home)]})
        time.sleep(0.5)
        kill_it()

    action.do, action.heal = do, lambda: target.set_process_faults({})
    return action


def _corrupted_profile(target: Target, row: dict[str, Any], turn: int) -> Action:
    action = _kill_worker(target, row, turn)
    kill_it, crit = action.do, row["kappa_crit"]
    kept: dict[Path, bytes] = {}

    def do() -> None:
        folder = target.home / "profiles"
        for path in folder.glob("*.json"):
            kept[path] = path.read_bytes()
            path.write_text(_CORRUPT[turn % len(_CORRUPT)])
        kill_it()

    def heal() -> None:
        for path, content in kept.items():
            path.write_bytes(content)

    def same() -> bool:
        now = target.node(action.node)
        return now is not None and now["kappa_crit"] == crit

    action.do, action.heal, action.shown = do, heal, same
    return action


# -- parts ----------------------------------------------------------------------------------------


def _total(target: Target, worker: str, name: str) -> float:
    row = target.worker(worker)
    return float(((row or {}).get("totals") or {}).get(name, 0))


def _risen(target: Target, worker: str, name: str) -> Callable[[], bool]:
    """Whether, soon, more is counted than now."""
    before = _total(target, worker, name)

    def risen() -> bool:
        return target.until(lambda: _total(target, worker, name) > before, _SHOW_S) is True

    return risen


def _chosen(target: Target, node: str, since_s: float) -> bool:
    """Whether a request that was decided after `since_s` (of this machine's clock) went there."""
    return any(d["node"] == node and d["time_s"] >= since_s for d in target.decisions())


_MAKERS: dict[str, Callable[[Target, dict[str, Any], int], Action]] = {
    "worker_killed": _kill_worker,
    "worker_stalled": _freeze_worker,
    "ingress_killed": _kill_ingress,
    "controller_killed": _kill_controller,
    "ray_head_killed": _kill_head,
    "slow_link": _slow_link,
    "loads_fail": _loads_fail,
    "events_lost": _events("lose"),
    "events_repeated": _events("repeat"),
    "events_reordered": _events("reorder"),
    "worker_clock_forward": _worker_clock(_HOUR_S),
    "worker_clock_back": _worker_clock(-_HOUR_S),
    "ingress_clock_forward": _ingress_clock(_HOUR_S),
    "ingress_clock_back": _ingress_clock(-_HOUR_S),
    "disk_full": _full_disk,
    "poisoned_profile": _corrupted_profile,
    "engine_killed": _kill_engine,
    "vllm_worker_killed": _kill_worker,
}

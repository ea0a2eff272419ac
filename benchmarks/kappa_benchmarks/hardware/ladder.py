"""`kappa doctor --gpu`: every rung in a process of its own, within its time; one JSON, one page.

A process each, because a CUDA error leaves a process without its device and a loop that hangs can
only be ended from outside; and so that each rung has the device's memory to itself. Rows are
written to a file as they are measured: a rung that is ended, or that dies, keeps them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kappa_benchmarks import harness
from kappa_benchmarks.hardware.device import Device, facts, write_model
from kappa_benchmarks.hardware.engines import Bench
from kappa_benchmarks.hardware.ladder_page import page, predicted, sentences
from kappa_benchmarks.hardware.rungs import EQUAL, RUNGS, Row

_POLL_S = 0.2
_END_WAIT_S = 5.0
_LOG_LINES = 12
Argv = Callable[[str, Path], Sequence[str]]


def climb(
    device: str | None, rungs: Sequence[str], model: Path | None, out: Path | None
) -> dict[str, Any]:
    """Climb these rungs (all, if none is named); write the JSON, the page and the logs to `out`.
    Those that are named share the time of all.

    Returns:
        The result; its `ok` is False if a rung failed or ran out of time.

    Raises:
        ValueError: no such device here, no such rung, or no config.json in `model`.
    """
    names = harness.names(",".join(rungs), RUNGS, "--rung") if rungs else tuple(RUNGS)
    place = Device.find(device)
    if model is not None and not (model / "config.json").is_file():
        raise ValueError(f"--model {model}: no config.json in it; give a folder with a checkpoint")
    known, bounds_s = facts(place), {name: rung.bound_s for name, rung in RUNGS.items()}
    longer = sum(bounds_s.values()) / sum(bounds_s[name] for name in names)
    most_s = {name: longer * bounds_s[name] for name in names}
    out = out or Path(f"kappa-{place.kind}-{time.strftime('%Y-%m-%d-%H%M')}")
    harness.note(f"{place.label}; {', '.join(names)}; results in {out}")
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kappa-ladder-") as folder:
        made = model or write_model(Path(folder) / "model", place.sizes)

        def argv(name: str, rows: Path) -> Sequence[str]:
            return [sys.executable, "-m", __name__, name, place.kind, str(made), str(rows)]

        done: list[Row] = []
        result = dict[str, Any]()
        for name in names:
            done.append(run_rung(name, argv, out, most_s[name]))
            result = harness.result(
                device=place.label, facts=known, model=str(model or "random weights"),
                total_s=time.monotonic() - start_s, rungs=done,
                ok=all(rung["status"] in ("ok", "skipped") for rung in done),
            )  # fmt: skip
            harness.save_json(result, out / "ladder.json")
    (out / "ladder.html").write_text(page(result), encoding="utf-8")
    harness.note(f"{result['total_s']:.0f} s in all; {out / 'ladder.html'}, {out / 'ladder.json'}")
    return result


def run_rung(name: str, argv: Argv, out: Path, bound_s: float) -> Row:
    """One rung: its rows, and how it ended: ok, failed, skipped, or out of time."""
    rung, log, rows = RUNGS[name], out / "logs" / f"{name}.log", out / "logs" / f"{name}.jsonl"
    log.parent.mkdir(parents=True, exist_ok=True)
    rows.unlink(missing_ok=True)
    harness.note(f"{name}: {rung.what} (at most {bound_s:.0f} s)")
    start_s, shown, code = time.monotonic(), 0, None
    with log.open("wb") as sink:
        process = subprocess.Popen(
            argv(name, rows), stdout=sink, stderr=sink, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        try:
            while code is None and time.monotonic() - start_s < bound_s:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(_POLL_S)
                notes = [r["text"] for r in harness.read_lines(rows) if r["kind"] == "note"]
                for text in notes[shown:]:
                    harness.note(f"  {text}")
                shown = len(notes)
        finally:
            _end(process)
    found = harness.read_lines(rows)
    outcome: Row = {
        "rung": name, "what": rung.what, "bound_s": bound_s, "seconds": time.monotonic() - start_s,
        "rows": predicted([row for row in found if row["kind"] != "note"]),
    }  # fmt: skip
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
    outcome |= status(found, code, bound_s, tail)
    harness.note(f"{name}: {outcome['status']} after {outcome['seconds']:.1f} s")
    for line in [*outcome["why"], *sentences(outcome["rows"])]:
        harness.note(f"  {line}")
    return outcome


def status(rows: Sequence[Row], code: int | None, bound_s: float, tail: str) -> Row:
    """The status of a rung, from its rows and its process' exit code (None: it was ended)."""
    wrong = [f"{r['arm']}: {r['verdict']}" for r in rows if r.get("verdict", EQUAL) != EQUAL]
    why = [f"{r['arm']}: {r['why']}" for r in rows if r["kind"] in ("failed", "skipped")] + wrong
    failed = bool(wrong) or any(r["kind"] == "failed" for r in rows)
    measured = any(r["kind"] not in ("note", "failed", "skipped") for r in rows)
    if code is None:
        return {"status": "out of time", "why": [*why, f"ended after {bound_s:.0f} s"]}
    if code:
        return {"status": "failed", "why": [*why, f"its process ended with {code}:\n{tail}"]}
    return {"status": "failed" if failed else "ok" if measured else "skipped", "why": why}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its process group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_WAIT_S)


def climb_one(name: str, kind: str, model: str, rows: str) -> None:
    """Run one rung, in a process of its own."""
    bench, file = Bench(Device(kind), Path(model)), Path(rows)
    for row in RUNGS[name].rows(bench):
        harness.append_line(file, row)


if __name__ == "__main__":
    climb_one(*sys.argv[1:])

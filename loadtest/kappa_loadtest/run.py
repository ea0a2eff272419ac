"""One load test from its first request to its last: endpoint, prompts, folder, decisions, stop.

Ctrl-C, or SIGTERM, stops sending and gives streams a short time to end; a second one ends them now.
Either way what was done is in the folder, from which the report is made. Called by `kappa replay`.
"""

from __future__ import annotations

import asyncio
import gc
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kappa_loadtest.client import Endpoint, EndpointSettings
from kappa_loadtest.cluster import Decisions
from kappa_loadtest.feeder import Feeder
from kappa_loadtest.run_folder import RunFolder
from kappa_loadtest.runner import Counts, Runner, RunSettings
from kappa_workload.replay import ReplaySession

# From this many signals on, decisions are not waited for.
_IN_A_HURRY = 2
# Files besides streams: the folder's, the event loop's own, the interpreter's.
_OTHER_FILES = 256
# The thread that makes prompts gives way to the event loop after this.
_SWITCH_S = 0.0005
# Collections of garbage stop all streams; with tens of thousands of live objects, for long.
_COLLECT_AFTER = (50_000, 20, 50)


@dataclass(frozen=True, slots=True)
class Played:
    """A run's outcome, besides its records."""

    was_stopped: bool  # by a signal
    elapsed_s: float
    client_cpu_share: float  # of one core
    decisions_missing: int = 0  # requests without a decision of our cluster


async def play(
    endpoint: EndpointSettings,
    settings: RunSettings,
    sessions: Iterator[ReplaySession],
    run_folder: RunFolder,
    counts: Counts,
) -> Played:
    """Send all sessions in order of arrival, without turns that the open folder has answers to.

    The clock begins at the folder's `elapsed_s`. `counts` is updated during the run.
    """
    with quick_process(), Feeder(sessions, endpoint.prepare, run_folder.done) as feeder:
        begin_s = time.monotonic() - run_folder.elapsed_s
        async with Endpoint(endpoint, lambda: time.monotonic() - begin_s) as client:
            # Nothing is fetched unless answers carry our headers.
            decisions = Decisions(client.decisions, run_folder.write)
            runner = Runner(
                client, settings, run_folder.write, counts, decisions, run_folder.elapsed_s
            )
            signals: list[bool] = []
            stops: list[Callable[[], object]] = [runner.stop, lambda: signals.append(True)]
            with _stopping(stops):
                await feeder.prime()
                begin_s, cpu_s = time.monotonic() - run_folder.elapsed_s, time.process_time()
                follow = asyncio.create_task(decisions.follow())
                try:
                    await runner.run(feeder)
                finally:
                    follow.cancel()
                    with suppress(asyncio.CancelledError):
                        await follow
                was_stopped = bool(signals)
                elapsed_s = client.now_s() - run_folder.elapsed_s
                cpu_share = (time.process_time() - cpu_s) / max(elapsed_s, 1e-9)
                # Records are complete without decisions: a second signal skips the wait.
                if len(signals) < _IN_A_HURRY:
                    settling = asyncio.create_task(decisions.settle())
                    stops.append(settling.cancel)
                    with suppress(asyncio.CancelledError):
                        await settling
    return Played(was_stopped, elapsed_s, cpu_share, decisions.missing)


def streams_allowed(wanted: int) -> int:
    """The most streams at once: `wanted`, or fewer if the system allows fewer open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and soft < hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return wanted if soft == resource.RLIM_INFINITY else max(min(wanted, soft - _OTHER_FILES), 1)


@contextmanager
def quick_process() -> Iterator[None]:
    """Tune the interpreter for many short tasks: fewer collections, faster thread switches."""
    thresholds, switch_s = gc.get_threshold(), sys.getswitchinterval()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(switch_s)
        gc.set_threshold(*thresholds)
        gc.unfreeze()


@contextmanager
def _stopping(stops: list[Callable[[], object]]) -> Iterator[None]:
    """Call all of `stops` at a signal; the list may grow."""
    loop = asyncio.get_running_loop()
    added = []
    for number in (signal.SIGINT, signal.SIGTERM):
        # Only the main thread may handle signals; elsewhere its owner stops the run.
        with suppress(ValueError, RuntimeError, NotImplementedError):
            loop.add_signal_handler(number, lambda: [stop() for stop in stops])
            added.append(number)
    try:
        yield
    finally:
        for number in added:
            loop.remove_signal_handler(number)


@contextmanager
def showing(counts: Counts, total: int | None, console: Console) -> Iterator[None]:
    """Show `counts` on a terminal while the block runs; elsewhere show nothing."""
    if not console.is_terminal:
        yield
        return
    columns = (TextColumn("requests"), BarColumn(), TextColumn("{task.description}"))
    bar = Progress(*columns, TimeElapsedColumn(), console=console)
    task = bar.add_task("", total=total)

    def drawn() -> RenderableType:
        failed = sum(counts.errors.copy().values())
        parts = [f"{counts.ended:,} ended", f"{counts.in_flight:,} in flight"]
        parts += [f"{counts.held_back:,} held back"] if counts.held_back else []
        parts += [f"[red]{failed:,} failed[/red]"] if failed else []
        bar.update(task, completed=counts.ended, description=", ".join(parts))
        return bar.get_renderable()

    with Live(get_renderable=drawn, console=console, transient=True):
        yield

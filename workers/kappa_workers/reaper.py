"""Ends processes that must not live on. A replica ends itself when its engine is dead or hangs: Ray
sees a dead process sooner than a sick one. A replica that cannot even do that is ended by its
fence. The processes that an engine started end with its replica, also where that is killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import structlog

from kappa.protocol import Announcement

log = structlog.get_logger(__name__)

OWNER_ENV = "KAPPA_ENGINE_OWNER"
_LOOK_EVERY_S = 0.25
# What the engine's last requests were answered must get out before the process ends.
_LAST_WORDS_S = 0.5
_STARTED_FIELD = 19  # of /proc/PID/stat, after the command's name
# An engine that owes answers is silent for no longer than a step, or a load, should take.
_HANG_S = 120.0
_HANG_STEPS = 10.0
_LONGEST_LOOK_S = 5.0
_BEAT_S = 0.5
# It counts seconds in which it ran itself: a machine may have slept. With these imports alone it is
# a process of some 8 MB.
_FENCE = """
import os, select, signal, sys
owner, most, silent = os.pidfd_open(int(sys.argv[1])), int(sys.argv[2]), 0
poller = select.poll()
for one in (0, owner):
    poller.register(one, select.POLLIN)
while silent < most:
    ready = [one for one, _ in poller.poll(1000)]
    if owner in ready or (ready and not os.read(0, 4096)):
        sys.exit()
    silent = 0 if ready else silent + 1
signal.pidfd_send_signal(owner, signal.SIGKILL)
"""


class EngineHungError(RuntimeError):
    """An engine owes answers and has shown no sign of life for longer than any step takes."""


class HangWatch:
    """Adds up how long an engine that owes answers has been silent. What passed between two looks
    counts for `_LONGEST_LOOK_S` at most: while this process was stopped it says nothing of the
    engine."""

    def __init__(self, patience_s: float, now_s: float) -> None:
        """`patience_s`: see `hang_patience_s`."""
        self._patience_s, self._looked_s = patience_s, now_s
        self._silent_s, self._signs = 0.0, -1

    def look(self, now_s: float, owed: int, signs: int) -> None:
        """Look once; owed: requests that the engine has not answered; signs: how often it has shown
        that it lives.

        Raises:
            EngineHungError: it was silent for too long.
        """
        passed_s = min(now_s - self._looked_s, _LONGEST_LOOK_S)
        alive = signs != self._signs or not owed
        self._silent_s = 0.0 if alive else self._silent_s + passed_s
        self._looked_s, self._signs = now_s, signs
        if self._silent_s > self._patience_s:
            raise EngineHungError(
                f"the engine owes {owed} answers and has done nothing for {self._silent_s:.0f} s"
            )


def hang_patience_s(announced: Announcement) -> float:
    """Real seconds of silence after which an engine counts as hung: two minutes, and ten times the
    longest step (a full budget behind a full context beside others with one) and load (a full
    context)."""
    context = announced.max_context_tokens
    batch = [(announced.max_batch_tokens, context), *[(0, context)] * announced.max_sequences]
    load_s = context * announced.kv_bytes_per_token / announced.node.h2d_bytes_per_s
    return _HANG_S + _HANG_STEPS * (announced.step.real_s(batch) + load_s * announced.node.dilation)


async def watch_engine(
    check: Callable[[], Awaitable[None]],
    end: Callable[[int], None] = os._exit,
    every_s: float = _LOOK_EVERY_S,
    last_words_s: float = _LAST_WORDS_S,
) -> None:
    while True:
        await asyncio.sleep(every_s)
        try:
            await check()
        except Exception as error:
            log.error("engine_dead", error=repr(error), then="the replica ends itself")
            await asyncio.sleep(last_words_s)
            end(1)
            return


def fence(patience_s: float) -> threading.Thread | None:
    """Have this process killed once none of its threads has run for so long: its connections stand
    until then, and what waits there would wait for an answer that cannot come. A busy event loop,
    or engine, does not count: the thread that shows life needs a moment of the interpreter every
    now and then. None where there is no pidfd (not Linux)."""
    if not hasattr(os, "pidfd_open"):
        return None
    seconds = str(max(round(patience_s), 1))
    keeper = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _FENCE, str(os.getpid()), seconds],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )

    def beat() -> None:
        assert keeper.stdin is not None
        with contextlib.suppress(OSError):
            while True:
                os.write(keeper.stdin.fileno(), b".")
                time.sleep(_BEAT_S)
        log.error("fence_gone", status=keeper.wait())

    thread = threading.Thread(target=beat, name="kappa-fence", daemon=True)
    thread.start()
    return thread


def own_engines() -> None:
    """Have the processes that this one starts from now on watch it (Linux)."""
    os.environ[OWNER_ENV] = f"{os.getpid()}:{_started(os.getpid())}"


def follow_owner(end: Callable[[int], None] = os._exit) -> threading.Thread | None:
    """End this process once its owner is gone; None where there is no owner, or it is the owner.
    Unlike the kernel's own signal it does not care which of the owner's threads started us, nor how
    many processes are between."""
    pid_text, _, started = os.environ.get(OWNER_ENV, "").partition(":")
    if not pid_text.isdigit() or int(pid_text) == os.getpid() or not hasattr(os, "pidfd_open"):
        return None
    try:
        owner = os.pidfd_open(int(pid_text))
    except ProcessLookupError:
        end(1)
        return None
    except OSError:
        return None  # a kernel without pidfd
    if _started(int(pid_text)) != started:
        end(1)  # its number has gone to another process already
        return None

    def wait() -> None:
        poller = select.poll()
        poller.register(owner, select.POLLIN)
        poller.poll()
        end(1)

    thread = threading.Thread(target=wait, name="kappa-owner", daemon=True)
    thread.start()
    return thread


def process_age_s() -> float:
    """Seconds since this process was started, by the kernel's count since boot, which no late
    import nor set clock changes; 0 where it does not say (not Linux)."""
    started = _started(os.getpid())
    if not started:
        return 0.0
    started_s = int(started) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s


def _started(pid: int) -> str:
    """When a process was started, in the kernel's ticks; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[_STARTED_FIELD]
    except OSError:
        return ""

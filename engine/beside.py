"""Something done over and over on other threads while something else is measured.

`engine.profiling` measures a link so, while the device stores and while the CPU computes. What runs
beside is under way before the block is entered, and over when it is left.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# An action that takes longer than this is stuck.
_WAIT_S = 60.0


@contextmanager
def repeating(action: Callable[[], object], threads: int = 1) -> Iterator[None]:
    """Repeat `action` on that many threads until the block is left; each has done it once before.

    Raises:
        RuntimeError: the action failed or got stuck, so what was measured is not what it says.
    """
    stop = threading.Event()
    ready = threading.Semaphore(0)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            action()
            ready.release()
            while not stop.is_set():
                action()
        except BaseException as error:
            errors.append(error)
            ready.release()

    running = [threading.Thread(target=work, daemon=True) for _ in range(threads)]
    for thread in running:
        thread.start()
    try:
        if not all(ready.acquire(timeout=_WAIT_S) for _ in running):
            raise RuntimeError(f"what runs beside the measurement took over {_WAIT_S:g} s")
        if not errors:
            yield
    finally:
        stop.set()
        for thread in running:
            thread.join(_WAIT_S)
    if errors:
        raise RuntimeError(f"what ran beside the measurement failed: {errors[0]}") from errors[0]

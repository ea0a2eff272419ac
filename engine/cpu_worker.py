"""One thread that computes on the CPU, with a bounded number of threads of torch's beneath it.

What the CPU computes beside a device (attention over host memory, layers of paper 002) is a queue
of jobs in order. torch keeps its number of threads per thread that asks, so a bound set here is no
bound elsewhere. Waits are bounded; a job that fails fails whoever waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotInTime
from typing import TypeVar

import torch

from engine.transfer import WAIT_S, TransferFailed

T = TypeVar("T")


class CpuWorker:
    """Computes jobs one after the other.

    Args:
        threads: of torch's, in each job.

    Raises:
        ValueError: no thread.
    """

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"{threads} threads for the CPU's share: give 1 or more")
        self.threads = threads
        self._newest: Future[object] | None = None
        self._pool = ThreadPoolExecutor(1, "kappa-cpu")
        with _setting:
            before = torch.get_num_threads()
            self._pool.submit(_set_threads, threads).result(WAIT_S)
            # The number that threads begin with is everybody's: put it back.
            torch.set_num_threads(before)

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Compute `job` when those before it are done; without gradients.

        Raises:
            RuntimeError: the worker is stopped.
        """

        def run() -> T:
            with torch.no_grad():
                return job()

        future = self._pool.submit(run)
        self._newest = future  # type: ignore[assignment]
        return future

    def settle(self, timeout_s: float = WAIT_S) -> None:
        """Wait until nothing is under way, well or not.

        Raises:
            TransferFailed: something still is, after that time.
        """
        newest, self._newest = self._newest, None
        if newest is not None and not newest.cancelled():
            try:
                newest.exception(timeout_s)
            except NotInTime:
                raise TransferFailed(f"the CPU still computes after {timeout_s:g} s") from None

    def stop(self) -> None:
        """What has not begun is dropped; the thread ends."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.settle()


def _set_threads(threads: int) -> None:
    # A thread takes everybody's number when it first asks: that must not come later.
    torch.get_num_threads()
    torch.set_num_threads(threads)


# Two workers that start at once would put back each other's number.
_setting = threading.Lock()


def result(future: Future[T], timeout_s: float = WAIT_S) -> T:
    """What a job gave.

    Raises:
        TransferFailed: it failed, or did not end in time.
    """
    try:
        return future.result(timeout_s)
    except NotInTime:
        raise TransferFailed(f"the CPU's share did not end within {timeout_s:g} s") from None
    except Exception as error:
        raise TransferFailed(f"the CPU's share failed: {error}") from error

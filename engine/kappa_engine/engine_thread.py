"""An engine on a thread of its own, for callers on other threads: asyncio servers above all.

The thread makes all calls between iterations, so the engine itself needs no locks; it also delivers
the outputs. If an iteration fails, all requests end with "error", and later ones are refused with
the cause. `stop` is bounded and leaves no thread behind.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from kappa_engine.llm_engine import REST_S, Engine
from kappa_engine.prefix_cache import CacheEvent
from kappa_engine.sequence import EngineRequest, FinishReason, Output

T = TypeVar("T")
Deliver = Callable[[Output], None]

# How long an idle thread sleeps before it looks whether it is to stop.
_IDLE_S = 0.5


class EngineStopped(RuntimeError):
    """The engine's thread has ended: it was stopped, or failed."""


class EngineThread:
    """Runs one engine until it is stopped; the engine must not be used otherwise.

    Args:
        publish: called with the changes of the prefix caches, in order, on the engine's thread.
    """

    def __init__(
        self, engine: Engine, publish: Callable[[list[CacheEvent]], None] | None = None
    ) -> None:
        self.error: BaseException | None = None
        self._engine, self._publish = engine, publish
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._deliver: dict[int, Deliver] = {}
        self._stopping = threading.Event()
        # Held to close the queue of calls, so that none is left in it without an answer.
        self._gate = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kappa-engine", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Call `function` with the engine between iterations; the future has its result or error.

        Raises (through the future):
            EngineStopped: the thread has ended.
        """
        answer: Future[T] = Future()

        def run() -> None:
            if self._stopping.is_set() or self.error is not None:
                answer.set_exception(self._refusal())
                return
            try:
                answer.set_result(function(self._engine))
            except Exception as error:
                answer.set_exception(error)

        with self._gate:
            if self._closed:
                answer.set_exception(self._refusal())
            else:
                self._calls.put(run)
        return answer

    def submit(self, request: EngineRequest, deliver: Deliver) -> Future[int]:
        """Queue a request, as `Engine.submit` does; the future has its number or the refusal.

        deliver: called from the engine's thread with all that the request gets; must not block.
        """

        def submit(engine: Engine) -> int:
            sequence = engine.submit(request)
            self._deliver[sequence.request_id] = deliver
            return sequence.request_id

        return self.call(submit)

    def withdraw(self, submitted: Future[int]) -> None:
        """End a request by the future that `submit` gave, even one that is not begun yet; nothing
        more is delivered."""

        def end(done: Future[int]) -> None:
            if not done.cancelled() and done.exception() is None:
                number = done.result()
                self._deliver.pop(number, None)
                self.call(lambda engine: engine.abort(number))

        submitted.add_done_callback(end)

    def stop(self, timeout_s: float = 30.0) -> None:
        """End all requests, the thread and the mover; `TimeoutError` if an iteration does not end
        in time."""
        end_s = time.monotonic() + timeout_s
        self._stopping.set()
        self._calls.put(lambda: None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the engine's iteration did not end within {timeout_s:g} s")
        self._engine.mover.stop(max(end_s - time.monotonic(), 0.1))

    # -- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        engine = self._engine
        try:
            while not self._stopping.is_set():
                self._do_calls(idle=not (engine.busy or len(engine.store)))
                if engine.busy or len(engine.store):
                    for output in engine.step():
                        self._give(output)
                if not engine.busy:
                    engine.store.rest(REST_S)
                # Taken in any case, or they would pile up without a publisher.
                if (events := engine.events()) and self._publish is not None:
                    self._publish(events)
        except BaseException as error:
            self.error = error
        # Answer all calls that still wait.
        with self._gate:
            self._closed = True
        reason: FinishReason = "error" if self.error is not None else "abort"
        for request_id in list(self._deliver):
            if self.error is None:
                engine.abort(request_id)
            self._give(Output(request_id, [], reason))
        self._stopping.set()
        self._do_calls(idle=False)

    def _do_calls(self, idle: bool) -> None:
        """Make the calls that wait; an idle engine waits for one."""
        with suppress(queue.Empty):
            if idle:
                self._calls.get(timeout=_IDLE_S)()
            while True:
                self._calls.get_nowait()()

    def _give(self, output: Output) -> None:
        """Deliver an output; a caller that fails, as with a closed event loop, ends no other."""
        over = output.finish_reason is not None
        deliver = (self._deliver.pop if over else self._deliver.get)(output.request_id, None)
        if deliver is not None:
            with suppress(Exception):
                deliver(output)

    def _refusal(self) -> EngineStopped:
        if self.error is None:
            return EngineStopped("the engine is stopped")
        refusal = EngineStopped(f"the engine failed: {type(self.error).__name__}: {self.error}")
        refusal.__cause__ = self.error
        return refusal

"""`torch.cuda` as the movers use it, without a GPU: every stream is done when a call returns.

A tick of its clock passes at each record, so that elapsed times can be told.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch


class FakeCuda:
    def __init__(self, monkeypatch) -> None:
        self.ticks = self.finished = 0
        cuda = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                self.timed, self.at = enable_timing, None

            def record(self, stream=None) -> None:
                cuda.ticks += 1
                self.at = cuda.ticks

            def query(self) -> bool:
                return self.at is not None

            def elapsed_time(self, end: Event) -> float:
                assert self.timed and end.timed, "an event that keeps no time was asked for it"
                return float(end.at - self.at)

        class Stream:
            def __init__(self, device=None) -> None:
                self.waited: list[Event] = []

            def wait_event(self, event: Event) -> None:
                assert event.query(), "waits for what was never recorded"
                self.waited.append(event)

            def record_event(self) -> Event:
                event = Event()
                event.record()
                return event

        self.current = Stream()
        fakes = {
            "Event": Event, "Stream": Stream, "stream": lambda stream: nullcontext(),
            "current_stream": lambda device=None: self.current, "is_available": lambda: True,
            "get_device_name": lambda device=None: "Fake GPU", "synchronize": self._finish,
        }  # fmt: skip
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def _finish(self, device=None) -> None:
        self.finished += 1

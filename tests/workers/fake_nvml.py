"""NVML for tests: shaped as pynvml, with watts from a script."""


class FakeNvml:
    """Shaped as pynvml: milliwatts by call, `NVMLError` where a value is None."""

    class NVMLError(Exception):
        pass

    def __init__(self, limits, watts):
        self.limits, self.watts = limits, watts
        self.reads, self.open = 0, False

    def nvmlInit(self):
        self.open = True

    def nvmlShutdown(self):
        assert self.open
        self.open = False

    def nvmlDeviceGetCount(self):
        return len(self.limits)

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetName(self, handle):
        return f"GPU {handle}".encode()

    def nvmlDeviceGetEnforcedPowerLimit(self, handle):
        return self._told(self.limits[handle])

    def nvmlDeviceGetPowerUsage(self, handle):
        self.reads += 1
        found = self.watts[handle]
        return self._told(found[(self.reads - 1) // len(self.limits) % len(found)])

    def _told(self, watts):
        if watts is None:
            raise self.NVMLError("not supported")
        return int(watts * 1000)

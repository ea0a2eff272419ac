"""NVML for tests: shaped as pynvml, with watts from a script."""


class FakeNvml:
    """Shaped as pynvml: milliwatts by call, `NVMLError` where a value is None; GPUs of 80 GB."""

    class NVMLError(Exception):
        pass

    def __init__(self, limits, watts, fault=""):
        self.limits, self.watts, self.fault = limits, watts, fault
        self.reads, self.open = 0, False

    def nvmlInit(self):
        if self.fault:
            raise self.NVMLError(self.fault)
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

    def nvmlDeviceGetUUID(self, handle):
        return f"GPU-{handle}abcd".encode()

    def nvmlDeviceGetMemoryInfo(self, handle):
        return type("Memory", (), {"total": 80_000_000_000})

    def nvmlSystemGetDriverVersion(self):
        return b"580.95.05"

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

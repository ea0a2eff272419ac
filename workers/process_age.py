"""How long this process has lived, by the kernel's count since boot.

Neither a module that was imported late nor a clock that was set changes it, so it tells what a
worker's start really took.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

_STARTED_FIELD = 19  # of those after the command's name, which may hold spaces


def process_age_s() -> float:
    """Seconds since this process was started; 0 where the kernel does not say (not Linux)."""
    if sys.platform != "linux":
        return 0.0
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started_s = int(after_name[_STARTED_FIELD]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s

"""What every result says of its making: the command as typed, and the machine.

And the option that all measuring commands share.
"""

from __future__ import annotations

import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def machine() -> str:
    """The machine in a few words."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    name = names[0] if names else platform.processor() or platform.machine()
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} x {name}, {memory_gb:.0f} GiB, {platform.system()}"


def command() -> str:
    """The command line, as typed."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])

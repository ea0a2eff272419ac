"""Scripts run in a peer's environment: JSON in, JSON out, and nothing outlives the caller.

Each script is a file in `scripts/`, run by path with the peer's own interpreter in a session of its
own, so that what it starts ends with it. Every wait is bounded.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).with_name("scripts")
_LAST_LINES = 3


class ScriptError(Exception):
    """A peer's script failed; says what it said last."""


@dataclass(frozen=True, slots=True)
class Done:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str


def peer_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Our environment without what would lead a peer's interpreter into our packages."""
    ours = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONSTARTUP"}
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return {**kept, **(more or {})}


def bounded_run(
    command: Sequence[str],
    *,
    timeout_s: float,
    stdin: str = "",
    environment: Mapping[str, str] | None = None,
) -> Done:
    """Run a command to its end; it and all it started are killed when the time is up.

    Raises:
        TimeoutError: it took longer than `timeout_s`.
    """
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=peer_environment(environment),
        start_new_session=True,
    ) as process:
        try:
            stdout, stderr = process.communicate(stdin, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(
                f"{Path(command[0]).name} did not end within {timeout_s:g} s"
            ) from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return Done(process.returncode, stdout, stderr)


def run_script(python: Path, name: str, request: Mapping[str, Any], timeout_s: float) -> Any:
    """What the script `name` answers to `request`: the JSON on its last line.

    Raises:
        ScriptError: it failed, took too long, or answered something else.
    """
    command = [str(python), "-I", str(SCRIPTS / name)]
    try:
        done = bounded_run(command, timeout_s=timeout_s, stdin=json.dumps(dict(request)))
    except (TimeoutError, OSError) as error:
        raise ScriptError(f"{name}: {error}") from error
    if done.code != 0:
        last = " | ".join(done.stderr.strip().splitlines()[-_LAST_LINES:])
        raise ScriptError(f"{name} ended with code {done.code}: {last or 'it said nothing'}")
    lines = done.stdout.strip().splitlines()
    try:
        return json.loads(lines[-1])
    except (IndexError, ValueError):
        said = lines[-1][:200] if lines else "nothing"
        raise ScriptError(f"{name} answered {said}, not JSON on its last line") from None

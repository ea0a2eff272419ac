"""The environment of Dynamo's wheel, which stays out of our lock.

It lies under the user's cache directory and is made the first time a bench wants it, with uv where
there is one and with pip otherwise. A file in it says what it was made of, and is written last, so
that one half made is made again.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.harness import note
from benchmarks.routing.peers.helper import HelperError

DYNAMO_VERSION = "1.6.1"
_REQUIREMENTS = (
    f"ai-dynamo-runtime=={DYNAMO_VERSION}", "pyzmq==27.3.0", "msgpack==1.2.4",
)  # fmt: skip
_READY = "kappa-peer"
_INSTALL_S = 600.0


def dynamo_python() -> str:
    """The interpreter of Dynamo's environment, which is made if it is not there.

    Raises:
        HelperError: it cannot be made; names the remedy.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    venv = cache / "kappa-serve" / "peers" / f"ai-dynamo-runtime-{DYNAMO_VERSION}"
    try:
        venv.parent.mkdir(parents=True, exist_ok=True)
        with venv.with_name(f"{venv.name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_ready(venv):
                _make(venv)
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None) or str(error)
        raise HelperError(
            f"Dynamo {DYNAMO_VERSION} could not be installed into {venv} ({output[-500:]}): "
            "name an index that can be reached (UV_INDEX_URL, PIP_INDEX_URL), a folder of wheels "
            "(UV_FIND_LINKS, PIP_FIND_LINKS), or a cache that can be written (XDG_CACHE_HOME)"
        ) from None
    return str(venv / "bin" / "python")


def _is_ready(venv: Path) -> bool:
    ready = venv / _READY
    return ready.exists() and ready.read_text().split() == list(_REQUIREMENTS)


def _make(venv: Path) -> None:
    note(f"making an environment for Dynamo {DYNAMO_VERSION} in {venv} (once)")
    shutil.rmtree(venv, ignore_errors=True)
    python = str(venv / "bin" / "python")
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if uv:
        _run([uv, "venv", "--quiet", "--python", sys.executable, str(venv)])
        _run([uv, "pip", "install", "--quiet", "--python", python, *_REQUIREMENTS])
    else:
        _run([sys.executable, "-m", "venv", "--without-pip", str(venv)])
        pip = [sys.executable, "-m", "pip", "--python", python]
        _run([*pip, "install", "--quiet", "--retries", "1", *_REQUIREMENTS])
    (venv / _READY).write_text("\n".join(_REQUIREMENTS) + "\n")


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=_INSTALL_S)

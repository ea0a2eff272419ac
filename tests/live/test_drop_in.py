"""`KappaRouter` in a plain Ray Serve LLM app: prompts come back to the replica that has them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import psutil
import pytest

from benchmarks.faults.cluster import first_line

pytestmark = pytest.mark.live

_START_S = 480.0
_STOP_S = 60.0
_SUBJECTS = ("rivers", "engines", "poems", "harbours", "proofs", "orchards")


@pytest.fixture(scope="module")
def plain_app() -> Iterator[str]:
    script = Path(__file__).with_name("plain_ray_app.py")
    app = subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    family = psutil.Process(app.pid)
    try:
        yield _url(app)
    finally:
        children = family.children(recursive=True) if family.is_running() else []
        assert app.stdin is not None
        app.stdin.close()
        try:
            app.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            app.kill()
        _, alive = psutil.wait_procs(children, timeout=20.0)
        for process in alive:
            process.kill()


def _url(app: subprocess.Popen[str]) -> str:
    line = first_line(app, "http://", _START_S)
    assert line, f"the plain app did not start (exit code {app.poll()})"
    return line.strip()


def test_prompts_return_to_the_replica_that_holds_them(plain_app: str) -> None:
    client = openai.OpenAI(base_url=f"{plain_app}/v1", api_key="none", timeout=120.0)

    def cached(subject: str) -> int:
        answer = client.chat.completions.create(
            model="plain",
            messages=[{"role": "user", "content": f"About {subject}. " + f"{subject} " * 300}],
            max_tokens=2,
        )
        assert answer.usage is not None
        details = answer.usage.prompt_tokens_details
        return (details.cached_tokens or 0) if details is not None else 0

    first = [cached(subject) for subject in _SUBJECTS]
    again = [cached(subject) for subject in _SUBJECTS]
    assert max(first) < 64, "fresh prompts share at most their template's first block"
    # Power of two would send about half of them to the replica without their blocks.
    assert min(again) > 250

"""Threads that attend to host memory, in the cluster file."""

from pathlib import Path

import pytest

from kappa.settings.base import SettingsError
from kappa.settings.cluster import load_settings


def written(folder: Path, text: str) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(text)
    return path


def test_threads_and_room_are_read(tmp_path: Path) -> None:
    engine = load_settings(
        written(
            tmp_path, "engine: {kind: torch, planner: cpu, cpu_threads: 2, cpu_room_share: 0.25}\n"
        )
    ).engine
    assert (engine.planner, engine.cpu_threads, engine.cpu_room_share) == ("cpu", 2, 0.25)
    assert load_settings(written(tmp_path, "engine: torch\n")).engine.cpu_threads == 0


@pytest.mark.parametrize(
    ("engine", "problem"),
    [
        ("{kind: vllm, cpu_threads: 1}", "cpu_threads needs kind torch"),
        ("{kind: torch, cpu_threads: 1, host_bytes: 0}", "host_bytes above zero"),
        ("{kind: torch, planner: cpu}", "planner cpu needs cpu_threads"),
        ("{kind: torch, cpu_threads: -1}", "cpu_threads"),
        ("{kind: torch, cpu_room_share: 1.5}", "cpu_room_share"),
        ("{kind: vllm, planner: cpu}", "planner cpu is not one of kind vllm"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, engine: str, problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        load_settings(written(tmp_path, f"engine: {engine}\n"))

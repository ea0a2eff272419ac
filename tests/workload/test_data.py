"""The files that ship: small, and each with its source, licence and checksum stated."""

import hashlib
from pathlib import Path

import pytest

from kappa_workload.sessions import demo_sessions_path

DATA = demo_sessions_path().parent
FILES = sorted(path for path in DATA.iterdir() if path.name != "README.md")


def section(path):
    text = (DATA / "README.md").read_text(encoding="utf-8")
    return text.partition(f"\n## {path.name}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_file_states_source_licence_and_how_it_was_made(path):
    stated = section(path)
    for part in ("**Source**", "**Licence**", "**Fields**", "**How it was made**"):
        assert part in stated
    assert hashlib.sha256(path.read_bytes()).hexdigest() in stated


def test_the_notice_mentions_every_file():
    notice = (Path(__file__).parents[2] / "NOTICE").read_text(encoding="utf-8")
    assert not [
        path.name for path in FILES if f"workload/kappa_workload/data/{path.name}" not in notice
    ]


def test_all_of_it_is_small():
    assert sum(path.stat().st_size for path in FILES) < 1_600_000

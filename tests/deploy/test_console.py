"""Tables that fit a terminal."""

import io

import pytest
from rich.console import Console

from kappa_deploy.commands import console


def printed(monkeypatch: pytest.MonkeyPatch, width: int, columns, rows) -> list[str]:
    out = io.StringIO()
    monkeypatch.setattr(console, "Console", lambda: Console(file=out, width=width))
    console.print_table("Title", columns, rows)
    return out.getvalue().splitlines()


def test_table_cuts_no_word_on_a_narrow_terminal(monkeypatch):
    columns = ["model", *(f"a-long-name-{n}" for n in range(6))]
    lines = printed(monkeypatch, 50, columns, [["llama-3.1-8b", *"123456"]])
    text = "\n".join(lines)
    assert all(name in text for name in columns)
    assert "…" not in text
    assert max(map(len, lines)) <= 50
    assert text.count("llama-3.1-8b") == 3  # two figures a table: 1 + 15 + 2 * 17 = 50


def test_table_stays_whole_where_it_fits(monkeypatch):
    lines = printed(monkeypatch, 80, ["model", "kappa"], [["llama", "17"]])
    assert "\n".join(lines).count("model") == 1

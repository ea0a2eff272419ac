"""What the pages of a report are made of: their style, sections, tables and numbers for people.

Used by `loadtest.page`. Text is escaped where it becomes HTML, here or there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from loadtest.slow import seconds

CSS = """
:root { color-scheme: light dark; --page: #fbfaf7; --text: #24262b; --soft: #666b75;
  --line: #d9d6cd; --card: #f2f0ea; --good: #2f7d4f; --bad: #b3394b; --late: #8c8c8c;
  --queue: #e08e45; --load: #4c8fd0; --compute: #4fa36c; --way: #b57bc4; --unknown: #c9b037; }
@media (prefers-color-scheme: dark) { :root { --page: #17191d; --text: #cfd2d8; --soft: #949aa6;
  --line: #343841; --card: #1f2227; --good: #6cc08b; --bad: #e37c8b; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1.25rem 4rem; max-width: 72rem; background: var(--page);
  color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.45rem; margin: 0 0 .2rem; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem; }
p.note, caption, figcaption { color: var(--soft); font-size: .87rem; text-align: left; }
.good { color: var(--good); } .bad { color: var(--bad); }
.badge { border: 1px solid currentColor; border-radius: .3rem; padding: .05rem .4rem;
  font-size: .8rem; margin-left: .5rem; vertical-align: middle; white-space: nowrap; }
.cards { display: flex; flex-wrap: wrap; gap: .6rem; margin: 1rem 0; }
.cards div { background: var(--card); border-radius: .4rem; padding: .5rem .8rem; min-width: 8rem; }
.cards b { display: block; font-size: 1.15rem; font-variant-numeric: tabular-nums; }
.cards span { color: var(--soft); font-size: .8rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .87rem; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .28rem .6rem; border-bottom: 1px solid var(--line);
  vertical-align: top; }
th { color: var(--soft); font-weight: 600; } td.l, th.l { text-align: left; }
td.why { text-align: left; min-width: 24rem; }
figure { margin: .4rem 0; } svg { max-width: 100%; height: auto; color: var(--text); }
.two { display: flex; flex-wrap: wrap; gap: 1rem; align-items: flex-start; }
.bar { display: flex; height: .55rem; min-width: 9rem; border-radius: .2rem; overflow: hidden;
  background: var(--line); margin-top: .35rem; }
.key i { display: inline-block; width: .8rem; height: .55rem; margin: 0 .3rem 0 .8rem; }
code { font: .85rem ui-monospace, monospace; overflow-wrap: anywhere; }
"""


def section(title: str, inner: str) -> str:
    """A part of the page under its heading; nothing if it is empty."""
    return f"<h2>{escape(title)}</h2>{inner}" if inner else ""


def figures(pictures: Mapping[str, str], *names: str) -> str:
    """The pictures of these names, those that there are."""
    return "".join(f"<figure>{pictures[name]}</figure>" for name in names if pictures.get(name))


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """A table of text; the columns in `left` are words, the others numbers."""
    tags = [" class=l" if i in left else "" for i in range(len(head))]
    first = "".join(f"<th{tag}>{escape(h)}</th>" for tag, h in zip(tags, head, strict=True))
    body = "".join(
        "<tr>"
        + "".join(f"<td{tag}>{escape(cell)}</td>" for tag, cell in zip(tags, row, strict=True))
        + "</tr>"
        for row in rows
    )
    return f"<div class=scroll><table><tr>{first}</tr>{body}</table></div>"


def some_seconds(value: float | None) -> str:
    """Seconds, or a dash."""
    return "–" if value is None else seconds(value)


def pair(spread: Mapping[str, float | None]) -> str:
    """Median and 99th percentile, in seconds."""
    return f"{some_seconds(spread['p50']).removesuffix(' s')} / {some_seconds(spread['p99'])}"


def rate(value: float | None) -> str:
    """Requests per second, or a dash."""
    return "–" if value is None else f"{number(value)} req/s"


def number(value: float | None) -> str:
    """Three digits that mean something, or a dash."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def count(value: int | None) -> str:
    """A whole number, or a dash."""
    return "–" if value is None else f"{value:,}"


def unasked(slo: Mapping[str, Any]) -> str:
    """How far an objective was met that nobody asked for: the endpoint's own."""
    return f"{slo['basis']} objective: {percent(slo['met'])} met"


def percent(value: float | None) -> str:
    """A share, or a dash."""
    return "–" if value is None else f"{100 * value:.1f} %"

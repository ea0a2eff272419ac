"""mini-SWE sessions: from a table of lengths, and from recorded texts."""

import json

import polars as pl
import pytest

from kappa_workload.catalogue import workload_named
from kappa_workload.miniswe import read_miniswe, read_miniswe_texts, shapes_of
from kappa_workload.reading import ReadAs, estimated_tokens
from kappa_workload.replay import Reuse
from kappa_workload.sessions import demo_sessions_path
from tests.workload.checks import check_refused


def row(name="a", t_s=0.0, length=1000, output=50, cached=0, new=None):
    return {
        "session": name,
        "t_s": t_s,
        "input_length": length,
        "output_length": output,
        "cached_C": cached,
        "new_N": length - cached if new is None else new,
    }


def table(tmp_path, *rows):
    path = tmp_path / "sessions.parquet"
    pl.DataFrame(list(rows)).write_parquet(path)
    return path


def recorded(tmp_path, *turns):
    path = tmp_path / "sessions.jsonl"
    fields = ("session", "t_s", "input", "output")
    path.write_text("".join(json.dumps(dict(zip(fields, t, strict=True))) + "\n" for t in turns))
    return path


def test_a_turn_extends_the_prompt_before_it_but_not_the_reply(tmp_path):
    path = table(tmp_path, row(output=200), row(t_s=1.5, length=1300, cached=992), row("b"))
    workload = read_miniswe(path, ReadAs(block_tokens=64))

    assert [len(session.turns) for session in workload.sessions] == [2, 1]
    first, second = workload.sessions[0].turns
    assert (first.after_s, second.after_s) == (0.0, 1.5)
    assert len(first.blocks) == 15
    assert second.blocks[:15].tolist() == first.blocks.tolist()
    assert not set(second.blocks[15:].tolist()) & set(first.kept_blocks.tolist())
    assert not set(workload.sessions[1].turns[0].blocks.tolist()) & set(first.blocks.tolist())
    assert read_miniswe(path).block_tokens == 64


def test_a_prompt_repeated_in_another_session_shares_its_blocks(tmp_path):
    path = table(
        tmp_path, row("a", length=1000), row("b", length=500), row("c", length=1000, cached=992)
    )
    a, b, c = (session.turns[0] for session in read_miniswe(path).sessions)

    assert a.blocks.tolist() == c.blocks.tolist()
    assert not set(b.blocks.tolist()) & set(a.blocks.tolist())


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (row("b", length=0), "Expected `int` >= 1 - at `$.input_length`"),
        (row("b", length=10**9), "<= 16777216 - at `$.input_length`"),
        (row("b", output=10**9), "<= 16777216 - at `$.output_length`"),
        (row("b", output=-1), ">= 0 - at `$.output_length`"),
        (row("b", cached=10, new=10), "'cached_C' 10 and 'new_N' 10 do not add up"),
        (row(t_s=1.0), "column 't_s' 1.0 is before the previous turn's 2.0"),
    ],
)
def test_a_bad_row_is_named(tmp_path, second, reason):
    path = table(tmp_path, row(t_s=2.0), second)
    check_refused(read_miniswe, path, ": row 2: ", reason)


def test_recorded_texts_share_their_longest_common_beginning(tmp_path):
    path = recorded(
        tmp_path,
        ("a", 0, "x" * 100, "reply"),
        ("b", 0, "y" * 50, ""),
        ("a", 3.5, "x" * 100 + "z" * 30, "reply"),
        ("c", 0, "x" * 95 + "w" * 35, "reply"),
        ("d", 0, "", "reply"),
    )
    workload = read_miniswe_texts(path, ReadAs(len, block_tokens=10))
    a, b, c, d = (session.turns for session in workload.sessions)

    assert [turn.after_s for turn in a] == [0.0, 3.5]
    assert [turn.input_tokens for turn in a] == [100, 130]
    assert a[1].blocks[:10].tolist() == a[0].blocks.tolist()
    assert c[0].blocks[:9].tolist() == a[0].blocks[:9].tolist()
    assert not set(c[0].blocks[9:].tolist()) & set(a[1].blocks.tolist())
    assert not set(b[0].blocks.tolist()) & set(a[1].blocks.tolist())
    assert (b[0].output_tokens, d[0].input_tokens) == (1, 1)


def test_the_shipped_texts_and_the_shipped_lengths_agree():
    """The slice is the first six turns of eight of the measured sessions."""
    texts = workload_named(str(demo_sessions_path()), ReadAs(estimated_tokens))
    lengths = {session.id: session for session in workload_named("miniswe").sessions}

    for session in texts.sessions:
        measured = lengths[session.id].turns[:6]
        for turn, known in zip(session.turns, measured, strict=True):
            assert turn.after_s == pytest.approx(known.after_s, abs=2e-3)
            assert turn.input_tokens == pytest.approx(known.input_tokens, rel=0.3)
        for before, after in zip(session.turns, session.turns[1:], strict=False):
            assert after.blocks[: len(before.blocks)].tolist() == before.blocks.tolist()


def test_no_sessions_have_no_shapes():
    assert shapes_of([], ReadAs(len)).sessions == ()


def test_the_shipped_lengths_reuse_what_their_source_says():
    """7,327 cached tokens a request in blocks of 16, so a little less in blocks of 64."""
    workload = workload_named("miniswe")
    cache = Reuse(workload.block_tokens, workload.block_tokens, outputs_kept=False)
    cached = [
        cache.visit(session, turn)
        for session in workload.sessions
        for turn in range(len(session.turns))
    ]
    assert 7326.8 - 64 < sum(cached) / len(cached) < 7326.8

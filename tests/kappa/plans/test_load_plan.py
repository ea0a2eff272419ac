"""Plans as data: what covers a prefix, and what no executor could run."""

from __future__ import annotations

import pytest

from kappa.plans.load_plan import LoadPlan, Segment, bounded, from_runs, layout


def test_layout_puts_recompute_in_front_or_at_the_back() -> None:
    front = layout(100, recompute=32, activations=16)
    assert front == (Segment("R", 0, 32), Segment("A", 32, 48), Segment("K", 48, 100))
    back = layout(100, recompute=32, activations=16, tail=True)
    assert back == (Segment("A", 0, 16), Segment("K", 16, 68), Segment("R", 68, 100))
    assert layout(64) == (Segment("K", 0, 64),)
    assert layout(64, recompute=64, tail=True) == (Segment("R", 0, 64),)
    assert layout(0) == ()


def test_runs_merge_where_neighbours_are_alike() -> None:
    runs = from_runs([("A", 16), ("A", 16), ("K", 0), ("K", 16), ("A", 3)])
    assert runs == (Segment("A", 0, 32), Segment("K", 32, 48), Segment("A", 48, 51))


def test_a_plan_names_its_kinds_and_their_tokens() -> None:
    plan = LoadPlan(layout(100, recompute=32, activations=16), 3.0, 2.0, 1.0, 400.0, why="test")
    assert plan.cached_tokens == 100
    assert (plan.tokens("R"), plan.tokens("A"), plan.tokens("K")) == (32, 16, 52)
    assert plan.kind == "recompute+activations+load" and plan.exact
    assert LoadPlan(()).cached_tokens == 0
    assert LoadPlan(()).kind == "load"


@pytest.mark.parametrize(
    ("segments", "problem"),
    [
        ((Segment("K", 0, 16), Segment("K", 32, 48)), "leaves a gap"),
        ((Segment("K", 0, 32), Segment("A", 16, 48)), "overlaps"),
        ((Segment("K", 16, 32),), "starts at 16 where the cover has reached 0"),
        ((Segment("K", 0, 8), Segment("R", 8, 16), Segment("K", 16, 24)), "at the front"),
        ((Segment("R", 0, 8), Segment("K", 8, 16), Segment("R", 16, 24)), "is one run"),
        ((Segment("S", 0, 8),), "exact=False"),
    ],
)
def test_plans_that_cannot_be_are_refused(segments: tuple[Segment, ...], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        LoadPlan(segments)


def test_recompute_in_two_neighbouring_segments_is_one_run() -> None:
    plan = LoadPlan((Segment("K", 0, 8), Segment("R", 8, 16), Segment("R", 16, 24)))
    assert plan.tokens("R") == 16


def test_sparse_plans_are_not_exact() -> None:
    assert not LoadPlan((Segment("S", 0, 8),), exact=False).exact


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("field", ["ttft_s", "load_s", "compute_s", "load_bytes"])
def test_costs_that_cannot_be_are_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"LoadPlan.{field}"):
        LoadPlan(layout(8), **{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "start", "end"), [("X", 0, 1), ("K", 1, 1), ("K", -1, 2)])
def test_segments_that_cannot_be_are_refused(kind: str, start: int, end: int) -> None:
    with pytest.raises(ValueError, match="Segment"):
        Segment(kind, start, end)  # type: ignore[arg-type]


def test_a_bounded_plan_covers_the_same_tokens() -> None:
    plan = LoadPlan(layout(40, recompute=30, activations=4), why="as asked")
    cut = bounded(plan, 16)
    assert [(s.kind, s.tokens) for s in cut.segments] == [("R", 16), ("K", 14), ("A", 4), ("K", 6)]
    assert bounded(plan, 0).tokens("R") == 0 and bounded(plan, 0).cached_tokens == 40
    for same in (LoadPlan(layout(40, recompute=40)), LoadPlan(layout(40)), plan):
        assert bounded(same, 30) is same
    tail = LoadPlan(layout(40, recompute=30, tail=True))
    assert bounded(tail, 16) is tail

"""Decisions and all that users see are as stored; `tests.golden.regenerate` renews them."""

import pytest

from tests.golden import router_logs
from tests.golden.goldens import GOLDENS, differences, stored
from tests.golden.regenerate import main

NEEDS = {"http": [pytest.mark.ray, pytest.mark.vllm], "manifests": [pytest.mark.ray]}
RENEW = "if this is meant, run: python -m tests.golden.regenerate"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=NEEDS.get(name, ())) for name in GOLDENS]
)
def test_nothing_changed_since_it_was_stored(name):
    now = GOLDENS[name]()
    if now is None:
        pytest.skip("rendering needs kubectl or kustomize")
    lines = differences(stored(name), now)
    assert not lines, "\n".join([*lines[:20], RENEW])


@pytest.mark.parametrize("name", router_logs.CONFIGS)
def test_a_recorded_log_replays_to_the_same_decisions(name):
    pairs = router_logs.decisions(name)
    assert len(pairs) == router_logs.CONFIGS[name]["decisions"]
    changed = [lines for then, now in pairs if (lines := differences(then, now))]
    assert not changed, f"{len(changed)} of {len(pairs)}, first: {changed[0]}; {RENEW}"


def test_every_recorded_log_is_replayed():
    files = {path.name.removesuffix(".jsonl.xz") for path in router_logs.FOLDER.glob("*.xz")}
    assert files == {*router_logs.CONFIGS} and len(files) >= 5


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ({"s": 1.0 + 1e-11, "names": ["a", "b"], "count": 3}, []),
        ({"s": 1.0 + 1e-8, "names": ["a", "b"], "count": 3}, ["/s: 1.0 -> 1.00000001"]),
        ({"s": 1.0, "names": ["a", "c", "d"], "count": 3},
         ["/names: b is gone", "/names: c is new", "/names: d is new"]),
        ({"s": 1.0, "names": ["a", "b"]}, ["/count: 3 -> nothing"]),
        ({"s": 1.0, "names": ["b", "a"], "count": 3},
         ["/names/0: 'a' -> 'b'", "/names/1: 'b' -> 'a'"]),
    ],
)  # fmt: skip
def test_differences_name_the_place(now, said):
    then = {"s": 1.0, "names": ["a", "b"], "count": 3}
    assert differences(then, now) == said


def test_an_unknown_golden_is_refused(capsys):
    assert main(["setings"]) == 2
    assert "settings" in capsys.readouterr().out

"""The demo's second act: what is sent, and what is said of it."""

import pytest

from kappa.settings.cluster import load_settings
from kappa_deploy.commands.demo_acts import (
    demo_settings,
    documents_act,
    gained,
    memory_bound_on,
)
from kappa_deploy.commands.demo_rows import Worth
from kappa_loadtest.run_folder import RequestRecord


def test_act_reads_documents_before_questions_and_fresh_prompts():
    settings = load_settings(**demo_settings())
    act, again = documents_act(settings), documents_act(settings)
    assert act == again
    texts = [chat.turns[0].messages[0]["content"] for chat in act.read]
    begun = [chat.turns[0].messages[0]["content"] for chat in act.asked]
    asked = [text for text in begun if text in texts]
    assert set(asked) == set(texts) and 0.6 < len(asked) / len(begun) < 0.9
    fresh = [text for text in begun if text not in texts]
    assert len(set(fresh)) == len(fresh)
    at_s = [chat.turns[0].pause_s for chat in act.asked]
    assert at_s == sorted(at_s) and len({chat.name for chat in act.asked}) == len(act.asked)


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict"),
    [
        ((1.0, 3.0), (1.1, 2.9), "a tie"),
        ((1.0, 3.0), (2.0, 2.0), "a gain: p99 TTFT is 0.50 .* goodput 1.50 times"),
        ((2.0, 2.0), (1.0, 3.0), "a loss: p99 TTFT is 2.00 .* goodput 0.67 times"),
        ((1.0, 2.0), (2.0, 3.0), "mixed"),
    ],
)
def test_the_sentence_says_gain_loss_or_tie(ours, theirs, verdict):
    rows = [Worth(name, 9, 0.1, *figures) for name, figures in (("this", ours), ("it", theirs))]
    said = gained("Agents", [*rows, Worth("worse", 9, 0.1, 50.0, 0.1)], "; because")
    assert f"Agents: {verdict.partition(':')[0]}" in said and said.endswith("(it); because.")
    for part in verdict.split(" .* "):
        assert part in said


def test_nothing_answered_is_said_to_be():
    none = Worth("this", 0, None, None, 0.0)
    assert gained("Agents", [none, none]) == "Agents: nothing to compare."


def test_memory_bound_share_is_by_the_nodes_own_ratio():
    def record(node, ratio, crit):
        return RequestRecord("s", 1, node=node, ratio=ratio, crit=crit)

    records = [record("pcie", 0.0, 20.0), record("c2c", 300.0, 400.0), record("c2c", 10.0, 400.0)]
    assert memory_bound_on("pcie", records) == pytest.approx(1 / 3)
    assert memory_bound_on("c2c", records) == 0.0
    assert memory_bound_on("other", records) is None

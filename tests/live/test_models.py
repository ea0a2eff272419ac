"""Two models of unlike vocabularies and an adapter of one, behind one endpoint, in vLLM."""

import os

import pytest

from tests.deploy.adapters import make_adapter
from tests.live.conftest import Live, serving
from workers.tiny_model import make_tiny_model

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(
        not os.environ.get("KAPPA_MORE_CLUSTERS"),
        reason="starts a cluster of its own: set KAPPA_MORE_CLUSTERS=1",
    ),
]

CONFIG = """
model: {{adapters: {{fine: {adapter}}}}}
pools:
  - {{name: pcie, profile: pcie, paced: true}}
  - {{name: other, profile: c2c, paced: true, model: {{id: other, source: {other}}}}}
engine: {{device_blocks: 200, max_context_tokens: 6144}}
"""

TEXT = "The story of the long tail counts again and again. " * 60


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    corpus = [f"quite another corpus, of {i} words and numbers {i * 7919}" for i in range(200)]
    other = make_tiny_model(folder / "other", corpus, seed=7)
    # All tiny models are of one shape.
    adapter = make_adapter(folder / "fine", other)
    with serving(folder, CONFIG.format(other=other, adapter=adapter)) as ready:
        yield Live(ready, folder / "router.jsonl")


def ask(live, model):
    """Its answer, and the record of its decision."""
    raw = live.openai.chat.completions.with_raw_response.create(
        model=model, messages=[{"role": "user", "content": TEXT}], max_tokens=8, temperature=0.0,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    return raw.parse(), live.decision(raw.headers["x-request-id"])


def test_each_model_and_adapter_is_answered_by_its_workers_from_a_cache_of_its_own(both):
    own = {"pcie"}
    nodes = {"other": {"other"}, both.model: own, "fine": own}
    answers = {}
    for model, its_nodes in nodes.items():
        cold, decided = ask(both, model)
        answers[model] = cold
        assert cold.model == model and decided["node"] in its_nodes
        predicted, actual = decided["predicted"], decided["actual"]
        assert predicted["device_tokens"] == predicted["cached_tokens"] == 0
        assert actual["device_tokens"] == actual["cached_tokens"] == 0
        assert actual["new_tokens"] == cold.usage.prompt_tokens
    for model, its_nodes in nodes.items():
        warm, decided = ask(both, model)
        assert decided["node"] in its_nodes
        found = decided["actual"]["device_tokens"]
        assert found == decided["predicted"]["device_tokens"] >= warm.usage.prompt_tokens - 64
        assert warm.usage.prompt_tokens_details.cached_tokens == found
        assert warm.choices[0].message.content == answers[model].choices[0].message.content
    texts = {answer.choices[0].message.content for answer in answers.values()}
    assert len(texts) == 3, "the adapter and the other model say something else"
    lengths = {model: answer.usage.prompt_tokens for model, answer in answers.items()}
    assert lengths["fine"] == lengths[both.model] != lengths["other"]


def test_nodes_name_their_model(both):
    assert {row["node"]: row["model"] for row in both.all_nodes()} == {
        "pcie": both.model,
        "other": "other",
    }

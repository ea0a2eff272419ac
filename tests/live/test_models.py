"""Two models of unlike vocabularies and an adapter of one, behind one endpoint, in vLLM."""

import pytest

pytestmark = pytest.mark.live

TEXT = "The story of the long tail counts again and again. " * 60


def ask(live, model):
    """Its answer, and the record of its decision."""
    raw = live.openai.chat.completions.with_raw_response.create(
        model=model, messages=[{"role": "user", "content": TEXT}], max_tokens=8, temperature=0.0,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    return raw.parse(), live.decision(raw.headers["x-request-id"])


def test_each_model_and_adapter_is_answered_by_its_workers_from_a_cache_of_its_own(idle):
    own = {"pcie", "c2c"}
    nodes = {"other": {"other"}, idle.model: own, "fine": own}
    answers = {}
    for model, its_nodes in nodes.items():
        cold, decided = ask(idle, model)
        answers[model] = cold
        assert cold.model == model and decided["node"] in its_nodes
        predicted, actual = decided["predicted"], decided["actual"]
        assert predicted["device_tokens"] == predicted["cached_tokens"] == 0
        assert actual["device_tokens"] == actual["cached_tokens"] == 0
        assert actual["new_tokens"] == cold.usage.prompt_tokens
    for model, its_nodes in nodes.items():
        warm, decided = ask(idle, model)
        assert decided["node"] in its_nodes
        found = decided["actual"]["device_tokens"]
        assert found == decided["predicted"]["device_tokens"] >= warm.usage.prompt_tokens - 64
        assert warm.usage.prompt_tokens_details.cached_tokens == found
        assert warm.choices[0].message.content == answers[model].choices[0].message.content
    texts = {answer.choices[0].message.content for answer in answers.values()}
    assert len(texts) == 3, "the adapter and the other model say something else"
    lengths = {model: answer.usage.prompt_tokens for model, answer in answers.items()}
    assert lengths["fine"] == lengths[idle.model] != lengths["other"]


def test_nodes_name_their_model(idle):
    assert {row["node"]: row["model"] for row in idle.all_nodes()} == {
        "pcie": idle.model, "c2c": idle.model, "other": "other",
    }  # fmt: skip

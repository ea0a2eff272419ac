"""vLLM's parameters in, our engine's request out; what our engines cannot do is refused."""

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

from kappa_workers.own_engine.asked import engine_request, refuse_unknown

pytestmark = pytest.mark.vllm


def test_a_request_is_read():
    extra = {"kappa_plan": "kv", "kappa_tenant": "alice", "kappa_request_id": "r"}
    params = SamplingParams(
        max_tokens=9, temperature=0.5, top_p=0.9, seed=3, stop="END", stop_token_ids=[9],
        extra_args=extra,
    )  # fmt: skip
    params.update_from_generation_config({}, eos_token_id=2)
    refuse_unknown(params, "it")
    request = engine_request([5, 6, 7], params, "s", 4)
    sampling = request.sampling
    assert (request.tokens, request.max_tokens, request.salt) == ([5, 6, 7], 9, "s")
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.5, 0.9, 3)
    assert sampling.stop_tokens == {2, 9} and (request.planner, request.priority) == ("kv", 4)
    assert (request.tenant, request.name, request.approx) == ("alice", "r", False)


def test_what_nobody_set_is_the_engines_to_choose():
    params = SamplingParams(ignore_eos=True, max_tokens=None)
    params.update_from_generation_config({}, eos_token_id=2)
    request = engine_request([5], params, None, 0)
    assert request.sampling.stop_tokens == frozenset() and request.max_tokens > 1_000_000
    assert (request.planner, request.salt, request.tenant) == (None, "", "default")


def test_an_approximate_answer_is_asked_for_by_the_front():
    params = SamplingParams(extra_args={"kappa_approx": "ok"})
    assert engine_request([5], params, None, 0).approx


@pytest.mark.parametrize(
    ("field", "value"),
    [("logprobs", 0), ("prompt_logprobs", 1), ("min_tokens", 3), ("top_k", 5), ("min_p", 0.1),
     ("logit_bias", {1: 2.0}), ("presence_penalty", 0.5), ("repetition_penalty", 1.1),
     ("bad_words", ["x"]), ("allowed_token_ids", [1]), ("trace_decode_token_ids", [1]),
     ("repetition_detection", RepetitionDetectionParams(4, 1, 3))],
)  # fmt: skip
def test_what_it_cannot_do_is_refused_by_name(field, value):
    params = SamplingParams(max_tokens=9, **{field: value})
    with pytest.raises(VLLMValidationError, match=f"{field}: our engine .*use vllm") as refused:
        refuse_unknown(params, "our engine")
    assert refused.value.parameter == field


def test_a_grammar_is_refused_by_the_name_that_clients_know():
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True))
    with pytest.raises(VLLMValidationError, match="response_format: "):
        refuse_unknown(params, "our engine")


def test_what_changes_nothing_is_taken():
    harmless = {"n": 2, "top_k": -1, "min_tokens": 0, "repetition_penalty": 1.0, "logit_bias": {}}
    for temperature in (0.7, 0.0):
        given = harmless | ({"n": 1} if not temperature else {})
        refuse_unknown(SamplingParams(temperature=temperature, **given), "our engine")

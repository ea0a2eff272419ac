"""What the engine is told of a request, and that a client cannot say it in our place."""

import base64
import json
from types import SimpleNamespace

import numpy as np
import pytest
from ray.serve.llm.openai_api_models import ChatCompletionRequest
from starlette.requests import Request

from kappa.cost import TokenCounts
from kappa.protocol import CHARGES_KEY, Charge
from router.access.tenants import Tenant
from router.errors import ApiError
from router.ingress.messages import engine_marks, mark, pinned, plan_asked, prompt_marks

pytestmark = pytest.mark.ray

ALICE = Tenant("alice", 2.5)


def decision(informed=True):
    counts = TokenCounts(device_tokens=32, cached_tokens=64, new_tokens=5)
    chosen = SimpleNamespace(counts=counts, load_s=0.25, compute_s=0.5, recomputed_tokens=0)
    return SimpleNamespace(
        request_id="r", informed=informed, chosen=chosen, prompt_tokens=101 if informed else 0
    )


def body(**xargs):
    return ChatCompletionRequest(
        model="m", messages=[{"role": "user", "content": "x"}], vllm_xargs=xargs or None
    )


def test_the_engine_is_told_whose_it_is_what_to_find_and_what_others_charged():
    elsewhere = {"alice": Charge(1.23456, 2.0, 0.0), "bob": Charge(0.0, 0.5, 0.0)}
    marks = engine_marks("r", decision(), ALICE, elsewhere)
    charges = json.loads(marks.pop("kappa_charges"))
    assert charges == {"alice": [1.235, 2.0, 0.0], "bob": [0.0, 0.5, 0.0]}
    assert marks == {
        "kappa_request_id": "r", "kappa_tenant": "alice", "kappa_weight": 2.5,
        "kappa_device_tokens": 32, "kappa_host_tokens": 64, "kappa_prompt_tokens": 101,
        "kappa_link_s": 0.25, "kappa_gpu_s": 0.5,
    }  # fmt: skip


def test_what_is_not_known_is_not_told():
    marks = engine_marks("r", decision(informed=False), ALICE, {})
    assert not {"kappa_prompt_tokens", "kappa_device_tokens", "kappa_host_tokens"} & set(marks)
    assert marks["kappa_request_id"] == "r"


def test_marks_pass_the_engines_own_schema_and_reach_its_extra_args():
    made = body()
    mark(made, engine_marks("r", decision(), ALICE, {"bob": Charge(1.0, 2.0, 3.0)}))
    again = ChatCompletionRequest.model_validate(made.model_dump())
    extra = again.to_sampling_params(16, {}).extra_args
    assert (extra["kappa_tenant"], extra["kappa_weight"]) == ("alice", 2.5)
    assert extra["kappa_host_tokens"] == 64
    assert json.loads(extra["kappa_charges"]) == {"bob": [1.0, 2.0, 3.0]}


def test_nothing_of_a_clients_stands_beside_our_words():
    forged = body(
        kappa_tenant="root", kappa_weight=1e9, kappa_charges="{}", kappa_anything=1,
        kv_cache_report_mode="all", kv_transfer_params="x", foreign="x",
    )  # fmt: skip
    marks = engine_marks("r", decision(), ALICE, {})
    mark(forged, marks)
    assert forged.vllm_xargs == marks and marks["kappa_tenant"] == "alice"
    assert CHARGES_KEY not in forged.vllm_xargs


def test_marking_again_for_another_worker_leaves_nothing_of_the_first():
    made = body()
    mark(made, engine_marks("r", decision(), ALICE, {"bob": Charge(1.0, 2.0, 3.0)}))
    mark(made, engine_marks("r", decision(informed=False), ALICE, {}))
    left = {CHARGES_KEY, "kappa_device_tokens", "kappa_host_tokens", "kappa_prompt_tokens"}
    assert not left & set(made.vllm_xargs)
    assert made.vllm_xargs["kappa_tenant"] == "alice"


def test_all_that_64_tenants_add_to_a_request_is_a_few_kilobytes():
    elsewhere = {f"tenant-{i:03}": Charge(12345.678, 1234.567, 123.456) for i in range(64)}
    small = len(json.dumps(engine_marks("r", decision(), ALICE, {})))
    assert small < 250
    assert len(json.dumps(engine_marks("r", decision(), ALICE, elsewhere))) < 4096


def test_a_workers_request_carries_the_pin_and_no_key():
    headers = [
        (b"Authorization", b"Bearer sk-a"), (b"X-Api-Key", b"sk-a"), (b"x-kappa-pin", b"forged"),
        (b"accept", b"*/*"),
    ]  # fmt: skip
    sent = pinned(Request({"type": "http", "headers": headers}), "w")
    assert dict(sent.headers) == {"accept": "*/*", "x-kappa-pin": "w"}


def test_an_engine_that_does_not_tokenize_is_sent_the_tokens_and_the_plan():
    marks = prompt_marks(np.array([1, 70_000, 3]), "kv")
    tokens = np.frombuffer(base64.b64decode(marks["kappa_prompt"]), dtype="<i4")
    assert (tokens.tolist(), marks["kappa_plan"]) == ([1, 70_000, 3], "kv")
    assert "kappa_plan" not in prompt_marks(np.array([1]), "")


def test_a_prompt_that_could_not_be_rendered_is_refused_for_such_an_engine():
    with pytest.raises(ApiError) as refused:
        prompt_marks(None, "")
    assert (refused.value.status, refused.value.code) == (400, "unsupported_prompt")


def test_the_plan_is_asked_for_by_a_header():
    asked = Request({"type": "http", "headers": [(b"x-kappa-plan", b" recompute ")]})
    assert plan_asked(asked) == "recompute"
    assert plan_asked(Request({"type": "http", "headers": []})) == ""


def test_what_is_computed_anew_is_not_announced_as_a_load():
    made = decision()
    made.chosen.recomputed_tokens = 48
    assert engine_marks("r", made, ALICE, {})["kappa_host_tokens"] == 16

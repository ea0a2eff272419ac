"""What passes beside a body: the engine's metadata, which no client can write, and headers."""

import json
from types import SimpleNamespace

import pytest
from ray.serve.llm.openai_api_models import ChatCompletionRequest

from kappa.cost import TokenCounts
from kappa.protocol import CHARGES_KEY, Charge
from kappa_router.api.metadata import decision_headers, routed_metadata, tenant_metadata
from kappa_router.api.tenants import Tenant

pytestmark = pytest.mark.ray


def decision(informed=True, recomputed_tokens=0, disk_tokens=0):
    chosen = SimpleNamespace(
        counts=TokenCounts(device_tokens=32, cached_tokens=64, new_tokens=5,
                           disk_tokens=disk_tokens), load_s=0.25,
        compute_s=0.5, recomputed_tokens=recomputed_tokens,
    )  # fmt: skip
    return SimpleNamespace(
        request_id="r", informed=informed, chosen=chosen, prompt_tokens=101 if informed else 0
    )


def metadata(made=None, elsewhere=None):
    sent = tenant_metadata("r", Tenant("alice", 2.5))
    return sent | routed_metadata(made or decision(), elsewhere or {})


def test_engine_is_sent_tenant_tokens_and_others_charges():
    elsewhere = {"alice": Charge(1.23456, 2.0, 0.0), "bob": Charge(0.0, 0.5, 0.0)}
    sent = metadata(elsewhere=elsewhere)
    charges = json.loads(sent.pop("kappa_charges"))
    assert charges == {"alice": [1.235, 2.0, 0.0], "bob": [0.0, 0.5, 0.0]}
    assert sent == {
        "kappa_request_id": "r", "kappa_tenant": "alice", "kappa_weight": 2.5,
        "kappa_device_tokens": 32, "kappa_host_tokens": 64, "kappa_prompt_tokens": 101,
        "kappa_link_s": 0.25, "kappa_gpu_s": 0.5,
    }  # fmt: skip


def test_engine_is_sent_the_tokens_on_disk():
    assert metadata(decision(disk_tokens=32))["kappa_disk_tokens"] == 32


def test_unknown_figures_are_not_sent():
    sent = metadata(decision(informed=False))
    unknown = {"kappa_prompt_tokens", "kappa_device_tokens", "kappa_host_tokens", CHARGES_KEY}
    assert not unknown & set(sent) and sent["kappa_request_id"] == "r"


@pytest.mark.parametrize(
    ("source", "silicon", "paced"),
    [
        ("paced", "", "true"),
        ("paced", "a/b/tp1", "true; silicon=a/b/tp1"),
        ("measured", "", "false"),
    ],
)
def test_response_says_where_how_and_why_it_was_computed(source, silicon, paced):
    made = decision()
    chosen = made.chosen
    chosen.node = SimpleNamespace(name="pcie", source=source, silicon=silicon)
    chosen.kappa_crit = 17.314
    chosen.plan, chosen.ttft_s, made.reason = "", 0.98765, "load"
    assert decision_headers(made) == {
        "x-kappa-node": "pcie", "x-kappa-paced": paced,
        "x-kappa-ratio": "12.80",  # 64 cached tokens over 5 new ones
        "x-kappa-crit": "17.31", "x-kappa-reason": "load", "x-kappa-predicted-ttft-ms": "987.6",
    }  # fmt: skip
    chosen.plan = "tail"
    assert decision_headers(made)["x-kappa-plan"] == "tail"


def test_seconds_are_sent_to_the_microsecond():
    made = decision()
    made.chosen.load_s, made.chosen.compute_s = 0.0123456, 0.0000014
    sent = metadata(made)
    assert (sent["kappa_link_s"], sent["kappa_gpu_s"]) == (0.012346, 0.000001)


def test_recomputed_tokens_are_not_announced_as_a_load():
    assert metadata(decision(recomputed_tokens=48))["kappa_host_tokens"] == 16


def test_metadata_passes_the_engines_schema_to_extra_args():
    body = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "x"}])
    body.vllm_xargs = metadata(elsewhere={"bob": Charge(1.0, 2.0, 3.0)})
    again = ChatCompletionRequest.model_validate(body.model_dump())
    extra = again.to_sampling_params(16, {}).extra_args
    assert (extra["kappa_tenant"], extra["kappa_weight"]) == ("alice", 2.5)
    assert extra["kappa_host_tokens"] == 64
    assert json.loads(extra["kappa_charges"]) == {"bob": [1.0, 2.0, 3.0]}


def test_metadata_of_64_tenants_is_a_few_kilobytes():
    elsewhere = {f"tenant-{i:03}": Charge(12345.678, 1234.567, 123.456) for i in range(64)}
    assert len(json.dumps(metadata())) < 250
    assert len(json.dumps(metadata(elsewhere=elsewhere))) < 4096

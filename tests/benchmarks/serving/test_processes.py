"""Which process is what, by its title."""

import pytest

from benchmarks.serving.processes import role_of


@pytest.mark.parametrize(
    ("title", "role"),
    [
        ("ray::ServeReplica:kappa:KappaDecider.x", "decider"),
        ("ray::ServeReplica:kappa:KappaIngress.x", "ingress"),
        ("ray::ServeReplica:envoy:KappaServer:pcie", "replica"),
        ("ray::ServeReplica:stock:OpenAiIngress", "stock ingress"),
        ("ray::ServeReplica:stock:LLMServer", "stock replica"),
        ("ray::ProxyActor", "proxy"), ("VLLM::EngineCore", "engine"), ("VLLM::Worker", "engine"),
        ("/site-packages/envoy/_bin/envoy -c x", "envoy"), ("ray::DashboardAgent", "ray"),
        ("python -m vllm.entrypoints.openai.api_server", "vllm"), ("sleep 1", "other"),
    ],
)  # fmt: skip
def test_a_process_is_known_by_its_title(title, role):
    assert role_of(title) == role

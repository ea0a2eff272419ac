"""schemathesis reads our OpenAPI document and asks what it promises, over HTTP."""

import os

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

CHECKS = schemathesis.checks.CHECKS.get_by_names(
    ["not_a_server_error", "content_type_conformance", "response_schema_conformance"]
)
EXAMPLES = int(os.environ.get("KAPPA_OPENAPI_EXAMPLES", "15"))


@pytest.fixture(scope="session")
def api(stack):
    return schemathesis.openapi.from_url(f"{stack.url}/openapi.json")


schema = schemathesis.pytest.from_fixture("api")


@schema.parametrize()
@settings(
    max_examples=EXAMPLES, deadline=None, derandomize=True,
    phases=[Phase.explicit, Phase.generate], suppress_health_check=[*HealthCheck],
)  # fmt: skip
def test_every_operation_keeps_to_its_document(case):
    answer = case.call(timeout=30)
    case.validate_response(answer, checks=CHECKS)


def test_the_document_names_every_endpoint(stack):
    paths = set(stack.http.get("/openapi.json").json()["paths"])
    assert {
        "/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{model}", "/v1/nodes",
        "/v1/route", "/v1/decisions", "/v1/tenants", "/metrics", "/ready",
    } <= paths  # fmt: skip

"""schemathesis reads our OpenAPI document and asks what it promises, over HTTP."""

import os

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

EXAMPLES = int(os.environ.get("KAPPA_OPENAPI_EXAMPLES", "8"))
_TIMEOUT_S = 30.0
schemathesis.checks.load_all_checks()
CHECKS = schemathesis.checks.CHECKS.get_by_names(
    ["not_a_server_error", "content_type_conformance", "response_schema_conformance"]
)
ENDPOINTS = {
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
    "/v1/messages/count_tokens", "/v1/models", "/v1/models/{model}", "/v1/nodes", "/v1/route",
    "/v1/decisions", "/v1/tenants", "/metrics", "/ready",
}  # fmt: skip


@pytest.fixture(scope="module")
def operations(face):
    document = face.http.get("/openapi.json").json()
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=face.url)
    return {
        f"{op.method.upper()} {op.path}": op for op in (r.ok() for r in schema.get_all_operations())
    }


def test_every_operation_keeps_to_its_document(operations):
    asked = []
    for name, operation in operations.items():

        @settings(
            max_examples=EXAMPLES, deadline=None, derandomize=True, phases=[Phase.generate],
            suppress_health_check=[*HealthCheck],
        )  # fmt: skip
        @given(case=operation.as_strategy())
        def keeps(case):
            answer = case.call(timeout=_TIMEOUT_S)
            case.validate_response(answer, checks=CHECKS)

        keeps()
        asked.append(name)
    assert {name.split()[1] for name in asked} >= ENDPOINTS


def test_the_document_names_every_endpoint(face):
    assert set(face.http.get("/openapi.json").json()["paths"]) >= ENDPOINTS

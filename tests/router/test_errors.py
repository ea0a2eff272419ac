"""Errors in OpenAI's shape, and the checks behind the schemas."""

from types import SimpleNamespace as Body

import pytest

from router.api.errors import (
    body_too_large,
    context_too_long,
    engine_failed,
    from_engine,
    no_worker,
    overloaded,
    queue_full,
    unknown_model,
    unreadable_body,
    validation_error,
)


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "param"),
    [
        (unknown_model("x", ["a", "b"]), 404, "invalid_request_error", "model_not_found", "model"),
        (body_too_large(9), 413, "invalid_request_error", "body_too_large", None),
        (
            context_too_long(90, 20, 100),
            400,
            "invalid_request_error",
            "context_length_exceeded",
            "messages",
        ),
        (no_worker("none", 3.0), 503, "server_error", "no_worker", None),
        (overloaded("full", 2.0), 429, "rate_limit_error", "overloaded", None),
        (queue_full(8, 0.1), 429, "rate_limit_error", "queue_full", None),
        (engine_failed(), 500, "server_error", "engine", None),
    ],
)
def test_each_error_has_the_shape_that_clients_read(error, status, kind, code, param):
    assert error.status == status
    inner = error.body()["error"]
    assert inner == {"message": error.message, "type": kind, "param": param, "code": code}
    assert inner["message"] == str(error) != ""


def test_messages_carry_the_numbers():
    assert "'x'" in unknown_model("x", ["a", "b"]).message
    assert "a, b" in unknown_model("x", ["a", "b"]).message
    assert all(n in context_too_long(90, 20, 100).message for n in ("100", "110", "90", "20"))
    # Without a bound on the answer at least one token must fit.
    assert "needs 101 (100 in the prompt)" in context_too_long(100, 0, 100).message


@pytest.mark.parametrize(
    ("seconds", "header"), [(0.0, "1"), (0.2, "1"), (1.0, "1"), (1.01, "2"), (59.5, "60")]
)
def test_retry_after_is_whole_seconds_and_never_zero(seconds, header):
    assert queue_full(1, seconds).headers() == {"retry-after": header}
    assert no_worker("x", seconds).headers() == {"retry-after": header}


def test_other_errors_give_no_time_to_come_back():
    assert engine_failed().headers() == {}


def test_an_engines_refusal_keeps_its_status_and_message():
    refused = from_engine(Body(error=Body(code=400, message="top_p is 7")))
    assert (refused.status, refused.kind) == (400, "invalid_request_error")
    assert refused.message == "top_p is 7"
    failed = from_engine(Body(message="boom", code=None))
    assert (failed.status, failed.kind, failed.message) == (500, "server_error", "boom")


def test_a_schemas_fault_names_the_field_not_the_text():
    error = validation_error(
        [{"loc": ("body", "messages", 0, "role"), "msg": "Field required", "input": "secret"}]
    )
    assert (error.status, error.param) == (400, "messages.0.role")
    assert error.message == "messages.0.role: Field required."
    assert validation_error([]).param == "body"


def test_broken_json_is_told_as_such():
    fault = {"type": "json_invalid", "loc": ("body", 3), "msg": "x", "ctx": {"error": "Expecting"}}
    assert validation_error([fault]).code == "invalid_json"
    assert "Expecting" in validation_error([fault]).message


def test_a_schema_that_raises_is_still_the_clients_fault():
    error = unreadable_body(TypeError("'int' object is not iterable"))
    assert (error.status, error.code, error.param) == (400, "invalid_value", None)
    named = ValueError("no")
    named.parameter = "stream_options"
    assert unreadable_body(named).param == "stream_options"

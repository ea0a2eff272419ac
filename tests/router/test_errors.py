"""Errors in OpenAI's shape, and the checks behind the schemas."""

import ast
import string
from pathlib import Path

import pytest

from kappa_router.api import errors
from kappa_router.api.errors import Fault, validation_error

FAULTS = {name: one for name, one in vars(errors).items() if isinstance(one, Fault)}
PACKAGE = Path(errors.__file__).parents[1]


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "param"),
    [
        (errors.UNKNOWN_MODEL(model="x", served="a, b"), 404, "invalid_request_error",
         "model_not_found", "model"),
        (errors.OPERATOR_ONLY(path="/x"), 403, "permission_error", "operator_only", None),
        (errors.NO_WORKER(why="none", retry_after_s=3.0), 503, "server_error", "no_worker", None),
        (errors.QUEUE_FULL(limit=8), 429, "rate_limit_error", "queue_full", None),
        (errors.INTERNAL(), 500, "server_error", "internal", None),
    ],
)  # fmt: skip
def test_errors_have_the_shape_that_clients_read(error, status, kind, code, param):
    assert error.status == status
    inner = error.body()["error"]
    assert inner == {"message": error.message, "type": kind, "param": param, "code": code}
    assert inner["message"] == str(error) != ""


def names_in(message):
    return {name for _, name, _, _ in string.Formatter().parse(message) if name}


def test_errors_get_the_values_that_their_messages_name():
    made = set()
    for path in PACKAGE.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call):
                continue
            name = getattr(call.func, "attr", getattr(call.func, "id", ""))
            if name in FAULTS:
                given = {keyword.arg for keyword in call.keywords} - {"retry_after_s"}
                assert given == names_in(FAULTS[name].message), f"{path.name}:{call.lineno}"
                made.add(name)
    chosen = {"REQUESTS_OVER_RATE", "TOKENS_OVER_RATE", "ANSWER_TOO_LARGE", "PROMPT_TOO_LARGE"}
    assert made | chosen == set(FAULTS), "each is made somewhere"


@pytest.mark.parametrize(
    ("seconds", "header"), [(0.0, "1"), (0.2, "1"), (1.0, "1"), (1.01, "2"), (59.5, "60")]
)
def test_retry_after_is_whole_seconds_and_never_zero(seconds, header):
    assert errors.QUEUE_FULL(limit=1, retry_after_s=seconds).headers() == {"retry-after": header}


def test_other_headers_say_how_to_authenticate_or_nothing():
    assert errors.INTERNAL().headers() == {}
    assert errors.NO_KEY().headers() == {"www-authenticate": "Bearer"}
    assert errors.TOKENIZER_NOT_STARTED().headers() == {"retry-after": "5"}


def test_half_a_surrogate_pair_in_a_message_can_be_sent():
    body = errors.bad_field("a\ud800", "no").body()["error"]
    assert body["message"] == "a\\ud800: no." and body["param"] == "a\\ud800"


def test_schemas_fault_names_the_field_not_the_text():
    fault = {"type": "int_parsing", "loc": ("query", "limit"), "msg": "No integer", "input": "x"}
    error = validation_error(fault)
    assert (error.status, error.param) == (400, "query.limit")
    assert error.message == "query.limit: No integer."

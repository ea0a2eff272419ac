"""Whatever is sent to a cluster, it answers in OpenAI's shape, never with 500, and tells no log.

`KAPPA_FUZZ_REQUESTS` raises the number of seeded requests (the goal is 100,000).
"""

import asyncio
import io
import json
import logging
import os
import time
from collections import Counter
from contextlib import contextmanager, redirect_stderr, redirect_stdout

import httpx
import pytest
import structlog
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest

from kappa_benchmarks.faults.bodies import CHAT, COMPLETION, PATHS, ROUTE, bad_requests
from kappa_benchmarks.faults.fuzz import complaint_of
from tests.conformance.conftest import MODEL

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

MARKER = "zqxsecretprompt"
REQUESTS = int(os.environ.get("KAPPA_FUZZ_REQUESTS", "400"))
SEED = int(os.environ.get("KAPPA_FUZZ_SEED", "20"))
EXAMPLES = max(REQUESTS // 10, 100)
_AT_ONCE = 16
_REQUEST_S = 30.0


@contextmanager
def listening():
    """Everything that is printed or logged meanwhile, by whatever way."""
    heard = io.StringIO()
    handler = logging.StreamHandler(heard)
    # Our own client's wire log is not the cluster's.
    handler.addFilter(
        lambda record: not record.name.startswith(("httpcore", "httpx", "hypothesis"))
    )
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(heard))
    try:
        with redirect_stdout(heard), redirect_stderr(heard):
            yield heard
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
        structlog.reset_defaults()


def evaluate(answer):
    """The fault of an answer; empty if it has none."""
    return complaint_of(answer.status_code, answer.text)


async def send_all(face, drawn):
    """Send them, several at once; the statuses, and what was wrong with which."""
    statuses, wrong = Counter(), []
    async with httpx.AsyncClient(base_url=face.url, timeout=_REQUEST_S) as client:

        async def sender():
            for bad in drawn:
                headers = [(k.encode(), v.encode("latin-1")) for k, v in bad.headers]
                try:
                    answer = await client.request(
                        bad.method, bad.path, content=bad.body, headers=headers
                    )
                except httpx.HTTPError as error:
                    wrong.append((repr(error), bad))
                    continue
                statuses[answer.status_code] += 1
                if complaint := evaluate(answer):
                    wrong.append((complaint, bad))

        await asyncio.gather(*(sender() for _ in range(_AT_ONCE)))
    return statuses, wrong


def test_seeded_bad_requests_get_answers_and_leave_nothing(face):
    schemas = {
        CHAT: ChatCompletionRequest.model_json_schema(),
        COMPLETION: CompletionRequest.model_json_schema(),
    }
    with listening() as heard:
        drawn = bad_requests(SEED, REQUESTS, MODEL, MARKER, schemas)
        statuses, wrong = asyncio.run(send_all(face, drawn))
        deadline_s = time.monotonic() + _REQUEST_S
        while face.reserved():
            assert time.monotonic() < deadline_s, "a reservation leaked"
            time.sleep(0.05)
    assert not wrong, f"{len(wrong)} of {REQUESTS}:\n" + "\n".join(map(_told, wrong[:20]))
    assert sum(statuses.values()) == REQUESTS
    # Good and bad ones were among them, or nothing was tried.
    assert statuses[200] > REQUESTS / 20 and statuses[400] > REQUESTS / 20, statuses
    assert MARKER not in heard.getvalue(), _around(heard.getvalue())
    print(f"{REQUESTS} requests: {dict(statuses)}")


def _told(fault):
    complaint, bad = fault
    return f"{complaint[:120]} {bad.path} {bad.body[:400]!r} {bad.headers}"


def _around(text):
    place = text.index(MARKER)
    return text[max(place - 500, 0) : place + 200]


AS_JSON = {"content-type": "application/json"}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=5)
    ),
    max_leaves=12,
)  # fmt: skip


@settings(
    max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=[*HealthCheck]
)  # fmt: skip
@given(path=st.sampled_from(PATHS), body=JSON, named=st.booleans(), messages=JSON)
def test_any_json_gets_an_answer(face, path, body, named, messages):
    if named and isinstance(body, dict):
        body = {"max_tokens": 2, **body, "model": MODEL, "messages": messages}
    answer = face.http.post(path, content=json.dumps(body).encode(), headers=AS_JSON)
    assert not (complaint := evaluate(answer)), complaint


@settings(
    max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=[*HealthCheck]
)  # fmt: skip
@given(path=st.sampled_from(PATHS), body=st.binary(max_size=200))
def test_any_bytes_get_an_answer(face, path, body):
    answer = face.http.post(path, content=body, headers=AS_JSON)
    # `kappa route` says where an object would go; there the server refuses it.
    is_object = face.kind == "route" and path == ROUTE and body.strip()[:1] == b"{"
    assert answer.status_code in ({200, 400, 422} if is_object else {400, 422}), answer.text
    assert not (complaint := evaluate(answer)), complaint


@pytest.mark.parametrize("path", PATHS)
def test_half_a_surrogate_pair_is_refused_and_can_be_told(face, path):
    for name in ("model", "\ud800", "messages"):
        body = {"model": MODEL, "messages": [{"role": "\ud800", "content": "x"}], name: "\ud800"}
        answer = face.http.post(path, content=json.dumps(body).encode(), headers=AS_JSON)
        # `kappa route` says where it would go; there the server refuses it.
        fine = {200} if face.kind == "route" and path == ROUTE else set()
        assert answer.status_code in {400, 404, 422} | fine, answer.text
        assert not (complaint := evaluate(answer)), complaint


@pytest.mark.parametrize("path", PATHS)
def test_a_body_nested_too_deeply_to_be_parsed_is_refused(face, path):
    for deep in ("[" * 20_000 + "]" * 20_000, '{"a":' * 5000 + "1" + "}" * 5000):
        body = f'{{"model": "{MODEL}", "messages": {deep}}}'
        answer = face.http.post(path, content=body.encode(), headers=AS_JSON)
        assert answer.status_code in (400, 422), answer.text
        assert not (complaint := evaluate(answer)), complaint

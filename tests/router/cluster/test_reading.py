"""What a worker's gate is to change of a body, by every API."""

import json

import pytest

from kappa.protocol import DECIDED_PATHS
from kappa_router.cluster.paths import own_paths
from kappa_router.cluster.reading import _APIS, taken
from tests.router.building import refused

CHAT, TEXT, MESSAGES, RESPONSES = (
    "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
)  # fmt: skip
SAID = [{"role": "user", "content": "hello"}]
BODIES = {
    CHAT: {"model": "m", "messages": SAID},
    TEXT: {"model": "m", "prompt": "hello"},
    MESSAGES: {"model": "m", "messages": SAID, "max_tokens": 4},
    RESPONSES: {"model": "m", "input": "hello"},
}


def read(path, **changes):
    return taken(path, json.dumps(BODIES[path] | changes).encode())


def test_paths_are_those_that_can_be_read():
    assert set(DECIDED_PATHS) == set(_APIS) == set(BODIES)


@pytest.mark.parametrize("path", DECIDED_PATHS)
def test_plain_body_goes_on_as_it_is(path):
    found = read(path)
    assert (found.changes.sets, found.changes.drops) == ({}, ())
    assert found.body.is_chat == (path != TEXT)
    assert found.body.model == "m"


def test_chat_loses_fields_that_mean_nothing():
    found = read(CHAT, store=True, vllm_xargs={"kappa_tenant": "me"}, temperature=None, n=1)
    assert sorted(found.changes.drops) == ["store", "temperature", "vllm_xargs"]
    assert not found.changes.sets


def test_chat_goes_on_without_its_unknown_parts():
    part = {"type": "text", "text": "hello", "uuid": "another's"}
    found = read(CHAT, messages=[{"role": "user", "content": [part], "secret": 1}])
    kept = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    assert found.changes.sets == {"messages": kept}


@pytest.mark.parametrize("path", DECIDED_PATHS)
def test_body_with_unknown_fields_is_refused(path):
    assert refused(read, path, kv_transfer_params={"do_remote_prefill": True}).status == 400


@pytest.mark.parametrize("body", [b"", b"[]", b'{"model": "m"', b"\xff"])
def test_body_that_is_no_object_is_refused(body):
    assert refused(taken, CHAT, body).status == 400


def test_own_paths_name_models_with_slashes():
    paths = own_paths(("plain", "org/model"))
    assert "/v1/models/org/model" in paths and "/v1/models/plain" not in paths
    assert len(set(paths)) == len(paths) and not set(paths) & set(DECIDED_PATHS)

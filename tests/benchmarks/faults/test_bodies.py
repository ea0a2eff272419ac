"""Hostile requests: the same for a seed, every field of a request model tried, nested ones too."""

import json

import numpy as np
import pytest

from kappa_benchmarks.faults.bodies import CHAT, COMPLETION, ROUTE, bad_requests, fields_known
from kappa_benchmarks.faults.hostile_values import BY_FIELD, fitting, spoilt, written

SCHEMA = {
    "properties": {
        "messages": {"type": "array", "items": {"$ref": "#/$defs/Message"}},
        "prompt": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "count": {"type": "integer"},
        "mode": {"enum": ["a", "b"]},
        "inner": {"$ref": "#/$defs/Inner"},
    },
    "$defs": {
        "Message": {"type": "object", "properties": {"role": {"const": "user"}},
                    "required": ["role"]},
        "Inner": {"type": "object", "properties": {"deep": {"$ref": "#/$defs/Inner"},
                                                   "flag": {"type": "boolean"}},
                  "required": ["flag"], "additionalProperties": {"type": "number"}},
    },
}  # fmt: skip
SCHEMAS = {CHAT: SCHEMA, COMPLETION: SCHEMA}


def drawn(seed=3, count=400):
    return list(bad_requests(seed, count, "m", "zqx", SCHEMAS))


def test_requests_are_the_same_for_a_seed_and_carry_the_marker():
    assert drawn() == drawn()
    assert drawn() != drawn(seed=4)
    assert sum(b"zqx" in bad.body for bad in drawn()) > 160


def test_every_field_of_a_model_and_every_known_danger_is_tried():
    tried = {name for bad in drawn(count=20_000) for name in bad.fields}
    assert fields_known(SCHEMAS) == set(SCHEMA["properties"])
    assert tried >= fields_known(SCHEMAS) | set(BY_FIELD)
    assert "kappa_tenant" in tried  # which no model has


def test_some_requests_are_good_and_some_are_no_json():
    bodies = [bad for bad in drawn() if bad.method == "POST" and bad.path in (CHAT, ROUTE)]
    assert sum(not bad.fields for bad in bodies) > len(bodies) / 10
    with pytest.raises((ValueError, RecursionError)):
        for bad in bodies:
            json.loads(bad.body)


def test_a_value_fits_its_schema():
    rng = np.random.default_rng(0)
    for _ in range(200):
        inner = fitting(rng, {"$ref": "#/$defs/Inner"}, SCHEMA)
        assert isinstance(inner["flag"], bool)  # required
        numbers = {name: value for name, value in inner.items() if name not in ("flag", "deep")}
        assert all(isinstance(value, float) for value in numbers.values())
        assert fitting(rng, SCHEMA["properties"]["mode"], SCHEMA) in ("a", "b")
        messages = fitting(rng, SCHEMA["properties"]["messages"], SCHEMA)
        assert all(message == {"role": "user"} for message in messages)


def test_spoiling_changes_one_place_and_leaves_the_rest():
    rng = np.random.default_rng(1)
    value = {"a": 1, "b": {"c": [1, 2, 3]}}
    found = [spoilt(rng, value) for _ in range(200)]
    assert value == {"a": 1, "b": {"c": [1, 2, 3]}}
    kept = [each for each in found if isinstance(each, dict) and each.get("b") == value["b"]]
    inside = [each for each in found if isinstance(each, dict) and each.get("a") == 1]
    assert any(each.get("a") != 1 for each in kept)
    assert any(each.get("b") != value["b"] for each in inside)


def test_what_json_cannot_write_is_written_all_the_same():
    assert written({"a": "zq-raw-digits"}) == '{"a": ' + "9" * 5000 + "}"
    assert written(["zq-raw-exponent"]) == "[1e999999]"
    assert written({"a": "zq-raw-lists"}).count("[") == 20_000

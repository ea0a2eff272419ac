"""What the application is told of tenants: digests of keys, and a key for our own requests."""

import pickle

import msgspec
import pytest

from deploy.app.access import own_headers, tenants_table
from deploy.app.build import build_app
from deploy.app.model import Model, StartError
from deploy.app.plan import engine_scheduler
from kappa.settings.cluster import load_settings
from kappa.shapes import model_shape
from scheduler.config import FairConfig
from workers.vllm.link_queue import LinkRules

KEYED = {"by_key": {"sk-alice-0123456": "alice"}, "weights": {"alice": 2.0}}


def test_the_ingress_gets_the_tenants_and_not_their_keys():
    tenants = tenants_table(load_settings(None, tenants={**KEYED, "unknown": "refuse"}))
    assert tenants.find(["sk-alice-0123456"]).weight == 2.0
    assert tenants.find(["sk-bob-012345678"]) is None
    assert b"sk-alice-0123456" not in pickle.dumps(tenants)


def test_without_keys_nobody_is_refused():
    tenants = tenants_table(load_settings())
    assert tenants.find(["anything"]).name == "default"


def test_our_own_requests_carry_a_key_only_where_one_is_needed():
    assert own_headers(load_settings()) == {}
    assert own_headers(load_settings(None, tenants=KEYED)) == {}
    refusing = load_settings(None, tenants={**KEYED, "unknown": "refuse"})
    scheme, key = own_headers(refusing)["authorization"].split()
    assert scheme == "Bearer" and key != "sk-alice-0123456"
    assert tenants_table(refusing).find([key]).operator
    assert not tenants_table(refusing).find(["sk-alice-0123456"]).operator


def test_engines_schedule_by_the_rule_weights_and_link_of_the_settings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = load_settings(
        tenants={"by_key": {"k" * 16: "a"}, "weights": {"a": 2.0}},
        scheduler={"window": 7, "duplex": "half", "log": "it.jsonl"},
    )
    scheduler = engine_scheduler(settings)
    config = FairConfig(**scheduler.config)
    assert (scheduler.rule, config.window, config.weights) == ("fair", 7, {"a": 2.0})
    rules = msgspec.convert(scheduler.link, LinkRules)
    assert (rules.duplex, rules.order, rules.store_backlog_s) == ("half", "loads_first", 10.0)
    assert scheduler.log == str(tmp_path / "it.jsonl")


MODEL = Model("nowhere", model_shape("llama-3.1-8b"), "")


def test_an_engine_of_our_own_cannot_be_paced():
    with pytest.raises(StartError, match="cannot be paced, but nodes pcie, c2c are"):
        build_app(load_settings(None, engine="torch"), MODEL)


def test_vllms_own_order_needs_vllm():
    settings = load_settings(None, engine="torch", scheduler={"name": "stock"}).unpaced()
    with pytest.raises(StartError, match=r"scheduler\.name is stock"):
        build_app(settings, MODEL)

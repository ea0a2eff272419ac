"""What workers report survives the wire; malformed fields are named, never a stray KeyError."""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec
import pytest

from kappa.cost import step_model
from kappa.hardware import node_profile
from kappa.protocol import (
    PROTOCOL,
    Admission,
    Announcement,
    Charge,
    Spent,
    TenantCharge,
    WorkerReport,
)
from kappa.shapes import model_shape

NODE = replace(node_profile("h100-pcie5"), source="paced", dilation=30.0)
ANNOUNCED = Announcement(
    worker="w", model="m", node=NODE, step=step_model(model_shape("llama-3.1-8b"), NODE),
    kv_bytes_per_token=131072.0, emulated_model="llama-3.1-8b", fingerprint="f", block_tokens=16,
    device_blocks=100, host_blocks=10, max_batch_tokens=512, max_context_tokens=4096,
    events_endpoint="tcp://a", snapshot_endpoint="tcp://b", measured={"h2d": [1, 2]},
)  # fmt: skip
REPORT = WorkerReport(
    "w", 1.5, steps_total=3, load_seconds_total=0.25, load_tokens_total=64,
    admitted=(Admission("r", 1, 2, 3), Admission("s", 0, 0, 9)), prefilled=("r", "q"),
    spent=(Spent("r", 0.25, 1.5),),
    charges=(TenantCharge("alice", 1.5, 0.25, 0.0), TenantCharge("bob", 2.0, 1.0, 3.0)),
    iterations_total=9, queued_iterations_total=4, budget_fill_sum=3.5, vram_fill_sum=2.25,
    passed_total={"vram": 7, "link": 1}, waiting=3,
)  # fmt: skip

WIRES = [
    lambda data: data,
    lambda data: json.loads(json.dumps(data)),
    lambda data: msgspec.msgpack.decode(msgspec.msgpack.encode(data)),
]


@pytest.mark.parametrize("wire", WIRES)
def test_both_survive_the_wire(wire):
    assert Announcement.from_dict(wire(ANNOUNCED.to_dict())) == ANNOUNCED
    assert WorkerReport.from_dict(wire(REPORT.to_dict())) == REPORT
    assert WorkerReport.from_dict({"worker": "w", "time_s": 1.0}) == WorkerReport("w", 1.0)


def test_a_copy_shares_nothing_that_can_change():
    data = ANNOUNCED.to_dict()
    data["measured"]["more"] = 1
    data["node"]["name"] = "other"
    assert "more" not in ANNOUNCED.measured
    assert ANNOUNCED.node.name == NODE.name


def test_reading_leaves_the_data_alone():
    data = ANNOUNCED.to_dict()
    Announcement.from_dict(data)
    assert isinstance(data["node"], dict)


def test_another_protocol_is_refused_by_name():
    data = {**ANNOUNCED.to_dict(), "protocol": PROTOCOL + 1, "unknown": 1}
    with pytest.raises(ValueError, match=r"worker w speaks protocol 2, this router 1"):
        Announcement.from_dict(data)


def without(data, name):
    return {key: value for key, value in data.items() if key != name}


@pytest.mark.parametrize(
    ("read", "data", "complaint"),
    [
        (
            Announcement,
            {**ANNOUNCED.to_dict(), "colour": 1},
            r"announcement: unknown keys \['colour'\]",
        ),
        (Announcement, without(ANNOUNCED.to_dict(), "node"), r"announcement: lacks \['node'\]"),
        (Announcement, {}, r"announcement: lacks \['worker', 'model'"),
        (WorkerReport, {**REPORT.to_dict(), "colour": 1}, r"report: .*unknown field `colour`"),
        (WorkerReport, {"worker": "w"}, r"report: .*missing required field `time_s`"),
        (
            WorkerReport,
            {"worker": "w", "time_s": 1.0, "admitted": [{"request_id": "r", "colour": 1}]},
            r"unknown field `colour` - at `\$\.admitted",
        ),
        (
            WorkerReport,
            {"worker": "w", "time_s": 1.0, "admitted": [{"request_id": "r"}]},
            r"required field `device_tokens` - at `\$\.admitted",
        ),
        (
            WorkerReport,
            {"worker": "w", "time_s": 1.0, "charges": [{"tenant": "a", "colour": 1}]},
            r"unknown field `colour` - at `\$\.charges",
        ),
        (
            WorkerReport,
            {"worker": "w", "time_s": 1.0, "charges": [{"tenant": "a"}]},
            r"required field `vram_s` - at `\$\.charges",
        ),
        (Announcement, {**ANNOUNCED.to_dict(), "step": {"token_s": 1.0}}, "StepModel"),
        (
            Announcement,
            {**ANNOUNCED.to_dict(), "node": {"name": "n"}},
            r"NodeProfile: lacks \['gpu'",
        ),
    ],
)
def test_what_is_malformed_is_named(read, data, complaint):
    with pytest.raises(ValueError, match=complaint):
        read.from_dict(data)


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf"), "3", None])
def test_a_charge_that_is_no_time_is_refused_by_name(wrong):
    charge = {"tenant": "alice", "vram_s": 1.0, "gpu_s": wrong, "link_s": 0.0}
    with pytest.raises(ValueError, match=r"Expected `float`.*\.charges\[0\]\.gpu_s"):
        WorkerReport.from_dict({"worker": "w", "time_s": 1.0, "charges": [charge]})
    with pytest.raises(ValueError, match=r"Expected `str`.*tenant"):
        WorkerReport.from_dict({"worker": "w", "time_s": 1.0, "charges": [{**charge, "tenant": 7}]})


@pytest.mark.parametrize("wrong", [-1, 1.5, "3"])
def test_an_arrival_without_a_count_is_refused_by_name(wrong):
    arrival = {"request_id": "r", "host_tokens": wrong}
    with pytest.raises(ValueError, match=r"Expected `int`.*\.arrived\[0\]\.host_tokens"):
        WorkerReport.from_dict({"worker": "w", "time_s": 1.0, "arrived": [arrival]})


def test_a_tenants_charge_is_its_seconds_without_the_name():
    assert TenantCharge("alice", 1.0, 2.0, 3.0).charge == Charge(vram_s=1.0, gpu_s=2.0, link_s=3.0)


def test_a_worker_that_has_done_nothing_reports_nothing():
    idle = msgspec.structs.asdict(WorkerReport("w", 3.0))
    counted = {name: value for name, value in idle.items() if isinstance(value, int | float)}
    assert counted.pop("time_s") == 3.0
    assert len(counted) > 20
    assert not any(counted.values()), counted

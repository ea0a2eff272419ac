"""`kappa doctor`: each check passes where all is well and does not where something is wrong."""

import copy
import json
from dataclasses import replace
from importlib.metadata import version

import httpx
import pytest
from typer.testing import CliRunner

from kappa.hardware import node_profile
from kappa_deploy.app.machine import GpuFacts, Machine
from kappa_deploy.checks.facts import Facts, Probe
from kappa_deploy.checks.table import OF_CLUSTER, OF_MACHINE, findings
from kappa_deploy.cli import app
from kappa_deploy.commands.doctor import send_twice

pytestmark = pytest.mark.ray

CHECKS = OF_MACHINE | OF_CLUSTER
H100 = GpuFacts("H100", 80 * 10**9, "580.95.05")
MACHINE = Machine("m", {}, memory_bytes=64 * 10**9, shm_bytes=32 * 10**9, gpus=(H100,))
NODE = {
    "node": "a", "pool": "p", "role": "both", "engine": "vllm", "seen_s_ago": 0.4,
    "breaker": {"state": "closed", "why": None},
    "clock_skew_s": -0.3, "limits": {"block_tokens": 16}, "kv_events": {"device": 40, "host": 12},
    "host_tier_contents": "told", "tiers": [{"tier": "host", "blocks": 100}],
    "calibration": {"link_scale": 1.2, "compute_scale": 0.9}, "profile_error": None,
    "profile": {"source": "measured", "h2d_bytes_per_s": 50e9, "flops_per_s": 600e12},
    "measured": {"device": "H100", "step": {"r2": 0.99}}, "graphs": "FULL_AND_PIECEWISE",
    "totals": {
        "steps_total": 50, "step_tokens_total": 900, "iterations_total": 50,
        "load_tokens_total": 64, "store_tokens_total": 192, "stores_dropped_total": 0,
        "failed_loads_total": 0, "tier_failures_total": {}, "event_gaps_total": 0,
        "rule_errors_total": 0, "misused_blocks_total": 0,
    },
}  # fmt: skip


def decision(predicted_s=1.1, real_s=1.0, cached=32, came=32, **more):
    return {
        "node": "a", "steered": "kappa",
        "predicted": {"ttft_s": predicted_s, "cached_tokens": cached},
        "actual": {"ttft_s": real_s, "device_tokens": 0, "cached_tokens": came, "new_tokens": 16},
        **more,
    }  # fmt: skip


WELL = Facts(
    installed={"ray": "2.60.0"},
    locked={"ray": "2.60.0", "vllm": "0.29.0"},
    machine=MACHINE,
    file_faults=[],
    priors={"p": node_profile("h100-pcie5")},
    nodes=[NODE],
    decisions=[decision() for _ in range(20)],
    losses={"evicted": 50.0, "orphans": 1.0},
    index_blocks=200.0,
    probe=Probe(100, 96, 96, 16),
)


def checked(name, **changes):
    (found,) = [row for row in findings("doctor", replace(WELL, **changes)) if row.where == name]
    assert bool(found.remedy) == (found.severity in ("warn", "fail"))
    return found


def node(**changes):
    """A node with changes; `totals__x=1` changes x inside totals."""
    made = copy.deepcopy(NODE)
    for place, value in changes.items():
        *outer, last = place.split("__")
        inside = made
        for key in outer:
            inside = inside[key]
        inside[last] = value
    return made


def test_every_check_passes_where_all_is_well():
    rows = findings("doctor", WELL)
    assert {row.where: row.severity for row in rows} == dict.fromkeys(CHECKS, "pass")
    assert all(row.what for row in rows)


# Of each check: a bad state, and the words for it.
ON_NODES = [
    ("workers", {"breaker__state": "open", "breaker__why": "stalled"}, "fail", "a open (stalled)"),
    ("workers", {"profile__silicon": "t/m/tp1"}, "pass", "1 report; steps of a by t/m/tp1"),
    ("workers", {"seen_s_ago": 11.0}, "fail", "a silent for 11 s"),
    ("clock", {"clock_skew_s": -3.0}, "warn", "at most 3 s (a)"),
    ("clock", {"clock_skew_s": 31.0}, "fail", "at most 31 s (a)"),
    ("clock", {"clock_skew_s": None}, "skip", "no worker has reported"),
    ("kv events", {"kv_events__medium:NVME": 3}, "fail", "a: 3 of medium:NVME"),
    (
        "kv events", {"kv_events": {"host": 3}}, "fail",
        "a: prompts of 48 tokens, no event of tier device",
    ),
    (
        "kv events", {"kv_events": {"device": 3}}, "fail",
        "a: 192 tokens stored, no event of tier host",
    ),
    (
        "kv events", {"kv_events": {"device": 3}, "host_tier_contents": "estimated"}, "pass",
        "3 blocks were announced",
    ),
    (
        "kv events",
        {"kv_events": {}, "limits__block_tokens": 32, "totals__store_tokens_total": 0},
        "skip", "no block was kept yet",
    ),
    ("host hits", {"tiers": []}, "skip", "no host tier is on (0 tokens loaded, 0 stored)"),
    (
        "host hits", {"totals__load_tokens_total": 0}, "skip",
        "nothing was evicted and wanted again yet (0 tokens loaded, 192 stored)",
    ),
    ("rates", {"calibration__link_scale": 1.6}, "warn", "a loads x1.6, steps x0.9"),
    ("rates", {"calibration__compute_scale": 0.3}, "fail", "a loads x1.2, steps x0.3"),
    ("rates", {"measured__step": {"r2": 0.9}}, "warn", "a step fit R² 0.9"),
    ("rates", {"measured": {}}, "pass", "a loads x1.2, steps x0.9"),
    ("priors", {"profile__h2d_bytes_per_s": 5.4e9}, "warn", "a h2d_bytes 10%"),
    ("priors", {"profile__flops_per_s": 1200e12}, "warn", "a flops 121%"),
    ("priors", {"profile__source": "paced"}, "skip", "no measured worker"),
    ("profile", {"profile_error": "no time"}, "warn", "1 of 1: a: no time"),
    ("host tier", {"tiers": []}, "warn", "1 of 1: a"),
    ("scheduler", {"totals__iterations_total": 0}, "warn", "1 of 1: a"),
    ("scheduler", {"totals__iterations_total": 0, "engine": "torch"}, "pass", "0 of 1"),
    ("cuda graphs", {"graphs": "NONE"}, "warn", "1 of 1: a"),
    ("cuda graphs", {"graphs": None}, "skip", "no worker on a GPU says"),
    ("cuda graphs", {"measured": {"device": "cpu"}}, "skip", "no worker on a GPU"),
    ("dropped stores", {"totals__stores_dropped_total": 2}, "warn", "a 2"),
    ("failed loads", {"totals__failed_loads_total": 2}, "fail", "a 2"),
    ("tier failures", {"totals__tier_failures_total": {"load": 2, "store": 1}}, "warn", "a 3"),
    ("event gaps", {"totals__event_gaps_total": 1}, "warn", "a 1"),
    ("rule errors", {"totals__rule_errors_total": 1}, "fail", "a 1"),
    ("misused blocks", {"totals__misused_blocks_total": 1}, "fail", "a 1"),
]  # fmt: skip

ELSEWHERE = [
    ("versions", {"installed": {"ray": "2.59.0"}}, "fail", "ray 2.59.0 for 2.60.0"),
    ("versions", {"locked": {}}, "skip", "no lock file"),
    ("memory", {"machine": replace(MACHINE, shm_bytes=64 << 20)}, "fail", "0.06711 GB free in"),
    ("memory", {"machine": replace(MACHINE, memory_bytes=10**9)}, "warn", "1 GB free of memory"),
    ("memory", {"machine": Machine("m", {})}, "pass", "unknown free of memory"),
    ("gpus", {"machine": replace(MACHINE, gpus=(), no_gpus="hidden")}, "skip", "hidden"),
    (
        "gpus", {"machine": replace(MACHINE, gpus=(replace(H100, driver="535.1"),))}, "fail",
        "needs 580.65.06 or newer",
    ),
    ("gpus", {"machine": replace(MACHINE, engine_build="cpu")}, "warn", "vLLM's CPU build"),
    ("cluster file", {"file_faults": ["pool a: x", "y"]}, "fail", "2 fault(s): pool a: x"),
    ("cluster file", {"file_faults": None}, "skip", "give --config"),
    ("workers", {"nodes": []}, "fail", "none"),
    ("workers", {"nodes": None}, "skip", "give --url"),
    ("index", {"losses": {"orphans": 3.0}}, "warn", "200 blocks held, 3 lost orphans 3"),
    ("hashes", {"probe": Probe(100, 96, 0, 16)}, "fail", "expected 96 and found 0 of 100"),
    ("hashes", {"probe": Probe(100, 0, 0, 16)}, "skip", "expected 0 and found 0 of 100"),
    ("hashes", {"probe": Probe(100, 96, 80, 16)}, "fail", "expected 96 and found 80"),
    ("hashes", {"probe": Probe(fault="refused")}, "fail", "refused"),
    ("hashes", {"probe": None}, "skip", "nothing was sent"),
    (
        "host hits", {"decisions": [decision(came=0)] * 3}, "fail",
        "64 tokens loaded, 192 stored; of 3 hits that were foreseen none came",
    ),
    ("prediction", {"decisions": [decision()] * 19}, "skip", "19 of at least 20"),
    ("prediction", {"decisions": [decision(1.2)] * 20}, "warn", "median 20.0%, p90 20.0% of 20"),
    # Nine in ten are right, and the tenth is far off.
    (
        "prediction", {"decisions": [*[decision(1.0)] * 18, *[decision(3.0)] * 4]}, "fail",
        "median 0.0%, p90 200.0% of 22",
    ),
    ("prediction", {"decisions": [decision(1.6)] * 20}, "fail", "median 60.0%"),
    ("steering", {"decisions": [decision(steered="ray")]}, "warn", "1 of 1 requests"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "status", "figure"), ON_NODES)
def test_what_is_wrong_with_a_worker_is_found(name, changes, status, figure):
    row = checked(name, nodes=[node(**changes)])
    assert row.severity == status and figure in row.what


@pytest.mark.parametrize(("name", "changes", "status", "figure"), ELSEWHERE)
def test_what_is_wrong_elsewhere_is_found(name, changes, status, figure):
    row = checked(name, **changes)
    assert row.severity == status and figure in row.what


def test_every_check_has_a_case_in_which_it_does_not_pass():
    cases = {name for name, _, status, _ in ON_NODES + ELSEWHERE if status in ("warn", "fail")}
    assert cases == set(CHECKS)


# -- the command


def test_doctor_without_a_url_skips_the_cluster_and_says_how():
    done = CliRunner().invoke(app, ["doctor", "--json"])
    found = json.loads(done.stdout)
    rows = {row["check"]: row for row in found["checks"]}
    assert done.exit_code == (1 if found["fail"] else 0)
    assert rows["versions"]["status"] == "pass" and version("ray") in rows["versions"]["figure"]
    assert rows["workers"]["figure"] == "of a running cluster: give --url"


def test_a_cluster_file_that_cannot_start_here_fails(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("pools: [{name: a, profile: h100-pcie5, placement: {gpus: 64}}]")
    done = CliRunner().invoke(app, ["doctor", "--config", str(file)])
    assert done.exit_code == 1
    assert "cluster file: 'kappa serve --dry-run' shows all" in done.stdout


def test_where_nobody_answers_the_command_says_so():
    done = CliRunner().invoke(app, ["doctor", "--url", "http://127.0.0.1:1"])
    assert done.exit_code == 1 and "give --url and --key" in done.stderr


def decider(expected, found, told=True, late=0):
    """A decider that expects and finds these tokens, and knows of the prompt if `told`; of what
    the second node computed after so many questions more."""
    sent, ids, asked = [], [], []

    def answer(request):
        match request.url.path:
            case "/v1/models":
                return httpx.Response(200, json={"data": [{"id": "m"}]})
            case "/v1/route":
                asked.append(len(sent))
                known = {"a": told, "b": told and asked.count(2) > late}
                counts = [
                    {"node": node, "device_tokens": expected * known[node], "cached_tokens": 0}
                    for node in known
                ]
                return httpx.Response(200, json={"candidates": counts})
            case "/v1/chat/completions":
                sent.append(json.loads(request.content)["messages"])
                ids.append(request.headers.get("x-request-id"))
                usage = {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": found}}
                return httpx.Response(200, json={"usage": usage})
            case path if path == f"/v1/decisions/{ids[-1]}":
                counts = {"device_tokens": expected - 16, "cached_tokens": 16}
                return httpx.Response(200, json={"node": "b", "predicted": counts})

    client = httpx.Client(transport=httpx.MockTransport(answer), base_url="http://x")
    client.asked = asked
    return client, sent


def test_a_prompt_is_sent_twice_and_both_counts_are_compared():
    client, sent = decider(96, 80)
    assert send_twice(client, [NODE]) == Probe(100, 96, 80, 16)
    first, second = sent
    assert first == second and len(first[0]["content"].split()) == 48
    other, again = decider(96, 96)
    send_twice(other, [NODE])
    assert again[0] != first, "no earlier run may have left it in the cache"


def test_a_probe_waits_for_the_events_of_both_workers():
    client, _ = decider(96, 80, late=3)
    send_twice(client, [NODE])
    assert client.asked == [1, 2, 2, 2, 2]


def test_a_prompt_of_which_no_event_tells_is_a_fault(monkeypatch):
    monkeypatch.setattr("kappa_deploy.commands.doctor._KNOWN_WITHIN_S", 0.0)
    client, sent = decider(96, 0, told=False)
    assert "no event told of it" in send_twice(client, [NODE]).fault and len(sent) == 1


def test_a_prompt_that_is_refused_is_a_fault():
    transport = httpx.MockTransport(
        lambda request: httpx.Response(
            200 if request.url.path == "/v1/models" else 429, json={"data": [{"id": "m"}]}
        )
    )
    client = httpx.Client(transport=transport, base_url="http://x")
    assert "could not be sent" in send_twice(client, [NODE]).fault

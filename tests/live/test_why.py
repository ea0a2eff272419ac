"""On a running cluster: where a request's time went, and what its nodes draw."""

import subprocess
import sys

import pytest


def ask(live, text, **options):
    answer = live.http.post(
        "/v1/chat/completions",
        json={
            "model": live.model, "max_tokens": 4, **options,
            "messages": [{"role": "user", "content": text}],
        },
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    return answer.headers["x-request-id"]


def test_a_requests_account_adds_up(idle):
    request_id = ask(idle, "where did it go? " + "the quick brown fox " * 200)

    def spent():
        told = idle.http.get(f"/v1/decisions/{request_id}").json()
        return told["actual"]["compute_s"] is not None and told["end"] == "done" and told

    told = idle.until(spent, "its worker reported nothing")
    spans = {span["name"]: span for span in told["timeline"]["spans"]}
    assert {"decider", "tokenize", "decide", "first_token", "queue", "load", "prefill"} <= set(
        spans
    )
    wait = spans["first_token"]["seconds"]
    inside = sum(spans[name]["seconds"] for name in ("queue", "load", "prefill"))
    assert inside == pytest.approx(wait, rel=1e-6)
    assert spans["prefill"]["seconds"] > 0
    assert spans["prefill"]["attributes"]["tokens"] == told["actual"]["new_tokens"]
    whole = spans["decider"]["seconds"]
    stations = ("tokenize", "decide", "first_token", "stream")
    parts = sum(spans[name]["seconds"] for name in stations if name in spans)
    assert parts == pytest.approx(whole, rel=0.05, abs=0.05)


def test_the_command_draws_it(idle):
    request_id = ask(idle, "draw me")
    program = "import typer; from kappa_deploy.commands.why import why; typer.run(why)"
    done = subprocess.run(
        [sys.executable, "-c", program, request_id, "--url", idle.url],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert request_id in done.stdout and "█" in done.stdout and "tokenize" in done.stdout


def test_a_request_that_nobody_sent_is_404(idle):
    answer = idle.http.get("/v1/decisions/nobody")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "request_not_found")


def test_paced_nodes_report_the_modelled_power_of_their_profile(idle):
    ask(idle, "warm")

    def told():
        totals = [node["totals"] or {} for node in idle.nodes()]
        return all(t.get("power_source") == "paced" for t in totals) and totals

    totals = idle.until(told, "a node told no power")
    assert all(70 <= t["power_w"] <= t["power_cap_w"] == 700 for t in totals)
    assert all(t["energy_j_total"] > 0 for t in totals)
    assert idle.metric("kappa_node_power_watts", source="paced") >= 140
    assert idle.metric("kappa_energy_joules_total", source="paced") > 0

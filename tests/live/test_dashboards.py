"""A real Prometheus scrapes the cluster under traffic: every panel's query returns data."""

import itertools
import json
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import httpx
import pytest

from kappa_dashboards import build, check
from kappa_deploy.prometheus import PrometheusError, ray_targets
from kappa_deploy.prometheus import prometheus as running_prometheus

# Ray's agents report every three seconds here: two reports with traffic before them make a rate.
TRAFFIC_S = 15.0
RATE_WINDOW_S = 12.0
PATIENCE_S = 60.0
CLIENTS, CHATS, TURNS = 4, 4, 6


@pytest.fixture
def prometheus(live):
    rules = [build.FOLDER / "rules" / name for name in build.RULE_FILES]
    jobs = {"kappa": [live.url.removeprefix("http://")], "ray": ray_targets(live.pid)}
    assert jobs["ray"], "Ray's metrics agent has told no port"
    try:
        with running_prometheus(jobs, rules) as server:
            yield server
    except PrometheusError as error:
        pytest.skip(str(error))


def converse(live, number, stop):
    """Several chats in turn: together they outgrow the device's cache, so the host tier serves."""
    chats = [
        [{"role": "user", "content": f"chat {number} {chat}: " + "the quick brown fox " * 250}]
        for chat in range(CHATS)
    ]
    for turn in itertools.count():
        for messages in chats:
            if stop.is_set():
                return
            answer = live.openai.chat.completions.create(
                model=live.model, messages=messages, max_tokens=8
            )
            if turn < TURNS:
                messages.append({"role": "assistant", "content": answer.choices[0].message.content})
                messages.append({"role": "user", "content": f"go on, {turn}"})


def _never_answered(prometheus):
    """The panels without data while there is traffic.

    Asked again for a while: a scrape may take one second here, which a busy machine misses now and
    then, and one that was missed leaves a step of 15 s without a sample.
    """
    deadline_s = time.monotonic() + PATIENCE_S
    answers = check.ask(prometheus, TRAFFIC_S, RATE_WINDOW_S, time.time())
    while missing := [answer for answer in answers if answer.is_missing]:
        if time.monotonic() > deadline_s:
            break
        time.sleep(3.0)
        wanted = {answer.title for answer in missing}
        again = check.ask(prometheus, TRAFFIC_S, RATE_WINDOW_S, time.time())
        answers = [answer for answer in again if answer.title in wanted]
    return missing


def test_every_panel_has_data_on_a_running_cluster(idle, prometheus, tmp_path):
    stop = Event()
    with ThreadPoolExecutor(CLIENTS) as pool:
        talks = [pool.submit(converse, idle, number, stop) for number in range(CLIENTS)]
        try:
            # Longer than the window: a subquery with steps of 15 s needs one with samples.
            time.sleep(TRAFFIC_S + 3.0)
            missing = _never_answered(prometheus)
        finally:
            stop.set()
    for talk in talks:
        talk.result()
    assert not missing, check.report(missing)

    # The check would have noticed a metric that does not exist.
    for uid in (board.uid for board in build.DASHBOARDS):
        text = (build.FOLDER / f"{uid}.json").read_text()
        (tmp_path / f"{uid}.json").write_text(text.replace("kappa_ttft_seconds", "kappa_tffts"))
    broken = check.ask(prometheus, TRAFFIC_S, RATE_WINDOW_S, time.time(), tmp_path)
    assert {"Goodput", "Time to first token"} <= {a.title for a in broken if a.is_missing}

    rules = httpx.get(f"{prometheus}/api/v1/rules").json()["data"]["groups"]
    faulty = {r["name"]: r["lastError"] for g in rules for r in g["rules"] if r.get("lastError")}
    assert not faulty, json.dumps(faulty)

"""A recorded log, replayed through the same wiring, gives identical decisions."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from kappa.cost import step_model
from kappa.hardware import node_profile
from kappa.model import kv_bytes_per_token
from kappa.protocol import Admission, Announcement, Arrival, WorkerReport
from kappa.shapes import model_shape
from kappa_router.config import RouterConfig
from kappa_router.decision import NoWorkerError, RouteRequest
from kappa_router.index.kv_event_types import BlocksRemoved, BlocksStored, WorkerReset
from kappa_router.policy import policy_named
from kappa_router.recording import RecordedRouter, replay
from kappa_router.router import Router

BLOCK = 32


def config() -> RouterConfig:
    return RouterConfig(policy=policy_named("ttft"), secret=7, index_blocks=500)


def announcement(worker: str, node: str) -> Announcement:
    profile, shape = node_profile(node), model_shape("llama-3.1-8b")
    return Announcement(
        worker=worker,
        model="m",
        node=profile,
        step=step_model(shape, profile),
        kv_bytes_per_token=kv_bytes_per_token(shape),
        emulated_model="",
        fingerprint="same",
        block_tokens=BLOCK,
        device_blocks=256,
        host_blocks=2048,
        max_batch_tokens=1024,
        max_context_tokens=16384,
        events_endpoint="",
        snapshot_endpoint="",
    )


def drive(router: Router, seed: int) -> int:
    """A random but plausible life; returns how often it decided."""
    rng = random.Random(seed)
    now_s, flights, decided = 100.0, [], 0
    prompts = [np.array([rng.randrange(3000) for _ in range(BLOCK * 40)]) for _ in range(12)]
    for worker, node in (("a", "pcie"), ("b", "c2c"), ("c", "h100-pcie5")):
        router.join(announcement(worker, node), now_s)
    for number in range(300):
        now_s += rng.expovariate(20.0)
        tokens = rng.choice(prompts)[: BLOCK * rng.randrange(1, 41)]
        draw = rng.random()
        if draw < 0.45:
            request = RouteRequest(f"r{number}", tokens, rng.choice([0, 8, 64]))
            try:
                worker = router.route(request, now_s).worker
            except NoWorkerError:
                continue
            decided += 1
            flights.append((request.request_id, worker))
            names = tuple(hash((worker, len(tokens), i)) & 0xFFFF for i in range(len(tokens) // 32))
            stored = tokens[: len(names) * BLOCK]
            tier = rng.choice(["device", "host"])
            router.blocks([BlocksStored(worker, "device", names, None, stored, BLOCK, 0)])
            if tier == "host":
                router.blocks([BlocksStored(worker, "host", names, None, stored, BLOCK, None)])
                router.blocks([BlocksRemoved(worker, "device", names[len(names) // 2 :])])
        elif draw < 0.85 and flights:
            request_id, worker = flights.pop(rng.randrange(len(flights)))
            admitted = (Admission(request_id, 0, 32, rng.randrange(1, 400)),)
            report = WorkerReport(worker, now_s, admitted=admitted, prefilled=(request_id,))
            router.report(report, now_s)
            router.first_token(request_id, now_s + 0.01)
            router.tokens(request_id, 5)
            router.release(request_id, now_s + 0.02)
        elif draw < 0.88:
            # Another decider's requests: they come, go, and are told whole now and then.
            worker, theirs = rng.choice("ab"), Arrival(f"o{number}", new_tokens=rng.randrange(4000))
            there = None if rng.random() < 0.5 else (theirs,)
            report = WorkerReport(worker, now_s, arrived=(theirs,), in_flight=there)
            router.report(report, now_s)
            if rng.random() < 0.5:
                router.report(WorkerReport(worker, now_s, finished=(f"o{number}",)), now_s)
        elif draw < 0.89:
            router.invalidate(rng.choice("abc"), now_s)
        elif draw < 0.9:
            router.blocks([WorkerReset(rng.choice("abc"))])
        elif draw < 0.95:
            router.backlogs_s(now_s)
        else:
            for worker in "abc":
                router.report(WorkerReport(worker, now_s), now_s)
    router.leave("c")
    return decided


def test_a_recorded_life_replays_to_identical_decisions() -> None:
    for seed in range(5):
        log: list[str] = []
        decided = drive(
            RecordedRouter(config(), lambda entry, log=log: log.append(json.dumps(entry))), seed
        )
        entries: list[dict[str, Any]] = [json.loads(line) for line in log]
        pairs = [pair for pair in replay(entries, Router(config())) if pair[0]]
        assert len(pairs) == decided > 60
        for then, now in pairs:
            assert now == then


def test_a_changed_log_does_not_replay_to_the_same_decisions() -> None:
    log: list[dict[str, Any]] = []
    drive(RecordedRouter(config(), log.append), seed=1)
    without_blocks = [entry for entry in log if entry["call"] != "blocks"]
    assert any(then != now for then, now in replay(without_blocks, Router(config())) if then)


def test_a_log_with_a_call_that_no_router_has_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="unknown call 'forget' in a router log"):
        replay([{"call": "forget", "now_s": 1.0}], Router(config()))

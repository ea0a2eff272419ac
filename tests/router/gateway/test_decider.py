"""Every refusal of a decider, what it answers else, and that each request ends exactly once."""

import asyncio
import json
import time
from dataclasses import replace

import pytest

from kappa.protocol import ENDPOINT_HEADER, TO_ID_HEADER
from kappa_router.api.app import Access
from kappa_router.api.tenants import Allowance, Tenant
from kappa_router.gateway import flights
from kappa_router.gateway.authz import Go, Inquiry, Refuse
from kappa_router.gateway.decider import content_digest
from kappa_router.gateway.scene import Asked
from kappa_router.recording import replay
from kappa_router.router import Router
from tests.router.building import tenants_of
from tests.router.gateway.scripted import CHAT, EMBEDDINGS, deciding, end
from tests.router.patience import until

KEYS = {"sk-alice": "alice", "sk-bob": "bob"}
ALICE, BOB = {"authorization": "Bearer sk-alice"}, {"x-api-key": "sk-bob"}
DIED, REFUSED = ("UC",), ("UF",)


def access_of(**allowances):
    return Access(
        tenants=tenants_of(KEYS, refuse=True), allowances=allowances, max_body_bytes=64 << 20
    )


def code_of(verdict):
    """A refusal's status and code."""
    assert isinstance(verdict, Refuse)
    assert verdict.headers["content-type"] == "application/json"
    return verdict.status, json.loads(verdict.body)["error"]["code"]


def idle(here):
    """Nothing is held any more: no place, lease, reservation."""
    return not len(here.flights) and not len(here.decider._places) and not here.live.router.flights


def left(here):
    """Tokens that alice has left in this minute."""
    return here.door.limits.headers("alice", 0.0)["x-ratelimit-remaining-tokens"]


# -- what goes on --------------------------------------------------------------------------------


async def test_decision_names_servers_in_order_and_an_id():
    async with deciding() as here:
        go = await here.ask(headers={"x-request-id": "mine"})
        assert isinstance(go, Go)
        chosen = here.live.records["mine"].decision.worker
        first, second = go.upstream[ENDPOINT_HEADER].split(",")
        assert first == here.scene.address(chosen) != second
        assert go.upstream[TO_ID_HEADER] == go.upstream["x-request-id"] == "mine"
        assert go.upstream["x-kappa-to-body"] == "{}"
        assert go.client["x-request-id"] == "mine"
        assert go.client["x-kappa-node"] == "h100-pcie5"
        assert "x-envoy-auth-headers-to-remove" not in go.upstream


async def test_decision_takes_no_id_that_is_unfit_or_open():
    async with deciding() as here:
        ids = [
            (await here.ask(headers={"x-request-id": one})).upstream[TO_ID_HEADER]
            for one in ("r", "r", "", "no spaces", "x" * 129)
        ]
        assert ids[0] == "r" and ids[1].startswith("r-") and len(set(ids)) == 5
        assert all(len(one) == 32 for one in ids[2:])


async def test_decision_keeps_another_tenants_record():
    async with deciding(access=access_of()) as here:
        await here.ask(headers={"x-request-id": "r", **ALICE})
        here.flights.ended(end("r", 400))
        go = await here.ask(headers={"x-request-id": "r", **BOB})
        assert go.upstream[TO_ID_HEADER].startswith("r-")
        assert here.live.records["r"].tenant == "alice"
        again = await here.ask(headers={"x-request-id": "r", **ALICE})
        assert again.upstream[TO_ID_HEADER] == "r"


async def test_decision_has_keys_of_ours_taken_off():
    async with deciding(access=access_of()) as here:
        go = await here.ask(headers=ALICE)
        assert go.upstream["x-envoy-auth-headers-to-remove"] == "authorization,x-api-key"


async def test_decision_bounds_the_wait_for_an_answer():
    header = "x-envoy-upstream-rq-per-try-timeout-ms"
    async with deciding(first_byte_s=2.0, answer_s=70.0) as here:
        assert (await here.ask(body={"stream": True})).upstream[header] == "2000"
        assert (await here.ask()).upstream[header] == "70000"


async def test_decision_says_what_answers_are_tried_elsewhere():
    header = "x-envoy-retriable-status-codes"
    async with deciding() as here:
        assert (await here.ask()).upstream[header] == "429,500,502,503,504"
        late = await here.ask(headers={"x-kappa-deadline-ms": "5"})
        assert late.upstream[header] == "429,500,502,503"
        assert header not in (await here.ask(body={"repeatable": False})).upstream
    async with deciding(foreign=False) as here:
        assert header not in (await here.ask()).upstream


async def test_decision_leaves_the_choice_to_a_present_balancer():
    async with deciding() as here:
        here.scene.via = "10.1.1.1:90"
        go = await here.ask()
        assert go.upstream[ENDPOINT_HEADER] == "10.1.1.1:90"
        assert go.upstream["x-envoy-max-retries"] == "0"


async def test_passed_path_goes_by_load_alone():
    async with deciding() as here:
        go = await here.ask(EMBEDDINGS, headers={"x-request-id": "e"})
        assert not here.live.records["e"].decision.informed
        assert "x-kappa-node" not in go.client


# -- refusals ------------------------------------------------------------------------------------


async def test_decider_refuses_unknown_keys_for_bodies_and_heads():
    async with deciding(access=access_of()) as here:
        for headers in ({}, {"authorization": "Bearer other"}):
            assert code_of(await here.ask(headers=headers)) == (401, "invalid_api_key")
            assert code_of(await here.admit(1 << 20, headers)) == (401, "invalid_api_key")
        assert here.door.keys_refused == 4


@pytest.mark.parametrize("path", ["/", "/v1/chat/completions/", "/flush_cache", "/v1/%63hat"])
async def test_decider_refuses_paths_that_are_not_listed(path):
    async with deciding() as here:
        assert code_of(await here.ask(path)) == (404, "not_found")
        assert code_of(await here.admit(5, path=path)) == (404, "not_found")


async def test_decider_refuses_in_the_shape_of_the_path():
    async with deciding() as here:
        verdict = await here.ask("/v1/messages?beta=true", {"model": "none"})
        assert verdict.status == 404 and json.loads(verdict.body)["type"] == "error"


async def test_decider_refuses_models_that_no_worker_serves():
    async with deciding() as here:
        verdict = await here.ask(body={"model": "none"}, headers={"x-request-id": "r"})
        assert code_of(verdict) == (404, "model_not_found")
        assert verdict.headers["x-request-id"] == "r" and idle(here)


async def test_decider_refuses_a_foreign_fairness_header():
    async with deciding(access=access_of()) as here:
        fairness = {"x-gateway-inference-fairness-id": "bob"}
        for answer in (here.ask(headers={**ALICE, **fairness}), here.admit(9, ALICE | fairness)):
            assert code_of(await answer) == (403, "foreign_tenant")
        assert here.door.refused["alice", "foreign_tenant"] == 2 and idle(here)
        assert isinstance(await here.ask(headers={**BOB, **fairness}), Go), "traffic goes on"


async def test_decider_refuses_a_request_over_its_tenants_limits():
    limits = {"alice": Allowance(2, 1000), "bob": Allowance(concurrent=1)}
    async with deciding(access=access_of(**limits)) as here:
        over = await here.ask(body={"max_tokens": 901}, headers=ALICE)
        assert code_of(over) == (400, "request_over_limit")
        assert over.headers["x-ratelimit-remaining-tokens"] == "1000" and idle(here)
        go = await here.ask(body={"max_tokens": 900}, headers=ALICE)
        assert go.client["x-ratelimit-remaining-tokens"] == "0"
        refused = await here.ask(headers=ALICE)
        assert code_of(refused) == (429, "rate_limit_exceeded")
        assert int(refused.headers["retry-after"]) >= 1
        await here.ask(headers=BOB)
        assert code_of(await here.ask(headers=BOB)) == (429, "too_many_concurrent")
        assert here.door.refused["bob", "too_many_concurrent"] == 1
        # The others were refused unread.
        assert [status for _, status in here.scene.refusals] == [400]


async def test_decider_refuses_a_request_that_finds_no_place():
    async with deciding(max_queue=1) as here:
        await here.ask(headers={"x-request-id": "r"})
        assert code_of(await here.ask()) == (429, "queue_full")
        here.flights.ended(end("r", 400))
        assert isinstance(await here.ask(), Go)


async def test_decider_refuses_when_no_server_is_there():
    async with deciding() as here:
        for worker in ("a", "b"):
            here.live.members._trip(worker, "disconnected")
        verdict = await here.ask()
        assert code_of(verdict) == (503, "no_worker") and "retry-after" in verdict.headers
        assert idle(here) and [status for _, status in here.scene.refusals] == [503]


async def test_decider_gives_all_back_when_its_scene_fails(monkeypatch):
    async with deciding() as here:
        monkeypatch.setattr(here.scene, "headers", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await here.ask()
        assert idle(here) and here.scene.ends == [("a", "unsent")]


# -- bodies that are to come ---------------------------------------------------------------------


async def test_large_body_may_come_if_it_fits():
    async with deciding(access=Access(max_body_bytes=1 << 20)) as here:
        assert isinstance(await here.admit(1 << 20), Go)
        assert code_of(await here.admit((1 << 20) + 1)) == (413, "body_too_large")
        assert isinstance(await here.admit(None), Go)


async def test_bodies_that_are_to_come_are_bounded_together():
    async with deciding() as here:
        admitted = [await here.admit(64 << 20) for _ in range(4)]
        refused = await here.admit(1 << 20)
        assert code_of(refused) == (429, "bodies_outstanding") and "retry-after" in refused.headers
        # One that came and was decided leaves its room to others.
        await here.ask(headers={TO_ID_HEADER: admitted[0].upstream[TO_ID_HEADER]})
        assert isinstance(await here.admit(None), Go)
        assert isinstance(await here.admit(1 << 20), Refuse)


async def test_bodies_that_never_come_hold_no_room_for_ever():
    async with deciding(access=Access(max_body_bytes=64 << 20, body_timeout_s=-100.0)) as here:
        for _ in range(20):
            assert isinstance(await here.admit(None), Go)


async def test_tenants_bodies_leave_others_their_share():
    async with deciding(access=access_of()) as here:
        for _ in range(4):
            await here.admit(None, ALICE)
        assert isinstance(await here.admit(1 << 20, ALICE), Refuse)
        assert isinstance(await here.admit(1 << 20, BOB), Go)


async def test_large_body_counts_once_against_limits():
    async with deciding(access=access_of(alice=Allowance(2))) as here:
        for _ in range(2):
            go = await here.admit(1 << 20, ALICE)
            assert isinstance(await here.ask(headers={**ALICE, **go.upstream}), Go)
        assert code_of(await here.admit(1 << 20, ALICE)) == (429, "rate_limit_exceeded")


# -- ends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "flags", "path", "expected"),
    [
        (200, (), CHAT, "done"),
        (404, (), CHAT, "refused"),
        (429, (), CHAT, "worker_full"),
        (500, (), CHAT, "error"),
        (500, (), EMBEDDINGS, "unjudged"),
        (503, DIED, CHAT, "worker_died"),
        (503, DIED, EMBEDDINGS, "unjudged"),
        (200, DIED, CHAT, "worker_died"),
        (503, REFUSED, CHAT, "unsent"),
        (504, ("UT",), CHAT, "error"),
        (0, ("DC",), CHAT, "client_gone"),
        (200, ("DR",), CHAT, "client_gone"),
    ],
)
async def test_request_ends_once_as_envoy_says(status, flags, path, expected):
    async with deciding("a", access=access_of(alice=Allowance(concurrent=1))) as here:
        await here.ask(path, headers={"x-request-id": "r", **ALICE})
        for _ in range(3):
            here.flights.ended(end("r", status, flags, tail=b"", events=3))
        assert here.scene.ends == [("a", expected)] and idle(here)
        assert isinstance(await here.ask(headers=ALICE), Go)


async def test_deadlines_504_is_no_failure():
    async with deciding("a") as here:
        await here.ask(headers={"x-request-id": "r", "x-kappa-deadline-ms": "1"})
        here.flights.ended(end("r", 504))
        assert here.scene.ends == [("a", "deadline")]


@pytest.mark.parametrize(("status", "tokens_left"), [(504, "900"), (500, "1000")])
async def test_deadlines_504_alone_pays_for_what_was_computed(status, tokens_left):
    late = {"x-request-id": "r", "x-kappa-deadline-ms": "1", **ALICE}
    async with deciding("a", access=access_of(alice=Allowance(tokens_per_minute=1000))) as here:
        await here.ask(headers=late)
        here.flights.ended(end("r", status))
        assert left(here) == tokens_left


async def test_request_without_an_answer_pays_nothing():
    async with deciding("a", access=access_of(alice=Allowance(tokens_per_minute=1000))) as here:
        await here.ask(headers={"x-request-id": "r", **ALICE})
        here.flights.ended(end("r", 0, ("UF",)))
        assert left(here) == "1000"


async def test_refusal_of_a_worker_ends_without_its_report():
    async with deciding("a", foreign=False) as here:
        await here.ask(headers={"x-request-id": "r"})
        here.flights.ended(end("r", 400))
        assert idle(here)


async def test_tail_of_an_end_says_what_was_used():
    async with deciding("a", access=access_of(alice=Allowance(tokens_per_minute=1000))) as here:
        await here.ask(body={"max_tokens": 500}, headers={"x-request-id": "r", **ALICE})
        here.flights.ended(end("r", tail=b"80 20", events=99))
        assert idle(here)
        assert left(here) == "900"


async def test_end_without_a_tail_counts_what_was_sent():
    async with deciding("a", access=access_of(alice=Allowance(tokens_per_minute=1000))) as here:
        await here.ask(body={"stream": True}, headers={"x-request-id": "r", **ALICE})
        here.flights.ended(end("r", sent_bytes=100 * flights._EVENT_BYTES))
        assert idle(here) and here.scene.ends == [("a", "done")]
        assert left(here) == "800"


async def test_client_that_leaves_pays_for_what_was_computed():
    async with deciding("a", access=access_of(alice=Allowance(tokens_per_minute=1000))) as here:
        await here.ask(headers={"x-request-id": "r", **ALICE})
        here.flights.ended(end("r", 0, ("DC",)))
        assert left(here) == "900"


async def test_client_that_leaves_while_it_is_decided_holds_nothing():
    async with deciding() as here:
        here.scene.hold.clear()
        asking = asyncio.create_task(here.ask())
        await asyncio.sleep(0.01)
        assert len(here.decider._places) == 1
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert idle(here) and not here.decider._deciding and not here.scene.ends


async def test_answer_that_envoy_did_not_read_ends_its_request():
    async with deciding("a") as here:
        go = await here.ask(headers={"x-request-id": "r"})
        here.flights.unread(go)
        here.flights.unread(Go())
        assert idle(here) and here.scene.ends == [("a", "client_gone")]


async def test_request_of_which_nothing_is_heard_ends_and_is_counted(monkeypatch):
    monkeypatch.setattr(flights, "_SWEEP_S", 0.05)
    async with deciding("a", unheard_s=100.0) as here:
        for name in ("goes-on", "lost"):
            await here.ask(headers={"x-request-id": name})
            here.flights._aloft[name].heard_s -= 200.0
        here.flights.goes_on("goes-on")
        sweeping = asyncio.create_task(here.flights.sweep())
        await until(lambda: "lost" not in here.flights)
        assert "goes-on" in here.flights and here.scene.ends == [("a", "timeout")]
        text = here.live.metrics.exposition().decode()
        assert "kappa_request_ends_lost_total 1.0" in text
        sweeping.cancel()


async def test_flights_end_what_envoy_had_when_it_was_killed(monkeypatch):
    monkeypatch.setattr(flights, "_CUT_S", 0.05)
    async with deciding("a") as here:
        await here.ask(headers={"x-request-id": "lost"})
        here.flights.cut()
        await here.ask(headers={"x-request-id": "of-the-next-envoy"})
        await until(lambda: "lost" not in here.flights)
        assert "of-the-next-envoy" in here.flights and here.scene.ends == [("a", "timeout")]


async def test_end_that_cannot_be_learnt_from_holds_nothing():
    async with deciding("a") as here:
        await here.ask(headers={"x-request-id": "r"})
        with pytest.raises(ValueError, match="invalid literal"):
            here.flights.ended(end("r", tail=b"no numbers"))
        assert not len(here.flights) and not len(here.decider._places)


async def test_present_balancer_tells_where_a_request_is():
    async with deciding() as here:
        here.scene.via = "10.1.1.1:90"
        for name in ("streamed", "whole"):
            await here.ask(headers={"x-request-id": name})
        here.flights.first("streamed", "b")
        for name in ("streamed", "whole"):
            here.flights.ended(end(name, upstream="10.1.1.1:90", told="b", events=1, tail=b""))
        assert [at for _, at in here.scene.moves] == ["b", "b"]


async def test_requests_end_tells_where_it_was():
    async with deciding("a", "b") as here:
        await here.ask(headers={"x-request-id": "r"})
        here.flights.ended(end("r", 400, upstream="10.0.0.2:80"))
        assert here.scene.moves == [("a", "10.0.0.2:80")]


async def test_first_tokens_are_heard_once():
    async with deciding("a") as here:
        await here.ask(headers={"x-request-id": "r"})
        here.flights.first("r", "")
        first_s = here.live.records["r"].ttft_s
        here.flights.first("r", "")
        here.flights.first("unknown", "")
        assert first_s is not None and here.live.records["r"].ttft_s == first_s


# -- attempts ------------------------------------------------------------------------------------


async def asked(here, **headers):
    """A request `r` on its way: the servers of its list."""
    go = await here.ask(headers={"x-request-id": "r", **headers})
    return ["ab"[int(one[7]) - 1] for one in go.upstream[ENDPOINT_HEADER].split(",")]


async def test_request_that_a_server_did_not_take_goes_to_the_next():
    async with deciding() as here:
        first, second = await asked(here)
        here.flights.failed(end("r", 0, REFUSED, here.scene.address(first)))
        assert isinstance(await here.flights.again("r", 2), Go)
        assert here.scene.ends == [(first, "unsent")]
        assert here.live.records["r"].decision.worker == second
        assert here.live.router.in_flight_on(first) == 0
        at = here.scene.address(second)
        here.flights.ended(end("r", upstream=at, events=1, tail=b""))
        assert here.scene.ends[1:] == [(second, "done")] and idle(here)
        assert not here.live.members.blocked().failing


async def test_log_of_a_second_attempt_replays_to_its_decision(tmp_path):
    log = tmp_path / "log.jsonl"
    async with deciding(record=str(log)) as here:
        first, _ = await asked(here)
        here.flights.failed(end("r", 0, REFUSED, here.scene.address(first)))
        assert isinstance(await here.flights.again("r", 2), Go)
        config = here.live.router.config
    entries = map(json.loads, log.read_text().splitlines())
    pairs = replay(entries, Router(replace(config, secret=1)))
    assert len(pairs) == 2 and all(then == now for then, now in pairs)


async def test_failure_that_is_logged_late_is_waited_for():
    async with deciding() as here:
        first, _ = await asked(here)
        asking = asyncio.create_task(here.flights.again("r", 2))
        await asyncio.sleep(0.01)
        here.flights.failed(end("r", 503, (), here.scene.address(first)))
        assert isinstance(await asking, Go) and here.scene.ends == [(first, "error")]


async def test_failure_that_is_read_as_its_time_ends_counts(monkeypatch):
    monkeypatch.setattr(flights, "_FAILURE_S", 0.01)
    async with deciding() as here:
        first, _ = await asked(here)
        failure, loop = end("r", 503, (), here.scene.address(first)), asyncio.get_running_loop()
        asking = asyncio.create_task(here.flights.again("r", 2))
        await asyncio.sleep(0)
        # The loop stands still: both are due in the same turn.
        loop.call_later(0.005, here.flights.failed, failure)
        loop.call_soon(time.sleep, 0.05)
        assert isinstance(await asking, Go) and here.scene.ends == [(first, "error")]


async def test_failure_that_is_not_logged_counts_as_a_death(monkeypatch):
    monkeypatch.setattr(flights, "_FAILURE_S", 0.01)
    async with deciding() as here:
        first, _ = await asked(here)
        here.scene.dead.add(first)
        assert code_of(await here.flights.again("r", 2)) == (503, "engine_died")


async def test_request_alone_in_a_dead_engine_goes_to_no_other():
    async with deciding() as here:
        first, _ = await asked(here)
        here.scene.dead.add(first)
        here.flights.failed(end("r", 0, DIED, here.scene.address(first)))
        assert code_of(await here.flights.again("r", 2)) == (503, "engine_died")
        here.flights.ended(end("r", 503, DIED, here.scene.address(first)))
        assert here.scene.ends == [(first, "worker_died")] and idle(here)


async def test_request_among_others_in_a_dead_engine_goes_on():
    async with deciding() as here:
        first, second = await asked(here)
        others = frozenset({second})
        here.live.route(here.flights._aloft["r"].request.__class__("other", exclude=others))
        here.scene.dead.add(first)
        here.flights.failed(end("r", 0, DIED, here.scene.address(first)))
        assert isinstance(await here.flights.again("r", 2), Go)
        assert here.scene.ends == [(first, "worker_died")]


async def test_content_that_two_engines_died_of_is_refused():
    async with deciding("a", "b", "c") as here:
        for _ in range(2):
            go = await here.ask(body={"tokens": 50}, headers={"x-request-id": "r"})
            chosen = here.live.records["r"].decision.worker
            here.scene.dead.add(chosen)
            here.flights.failed(end("r", 0, DIED))
            verdict = await here.flights.again("r", 2)
            here.flights.ended(end(go.upstream[TO_ID_HEADER], 503, DIED))
            here.live.members._trip(chosen, "disconnected")
        assert code_of(verdict) == (422, "killed_an_engine")
        assert code_of(await here.ask(body={"tokens": 50})) == (422, "killed_an_engine")
        assert isinstance(await here.ask(body={"tokens": 51}), Go)


def test_content_is_named_by_its_tenant_path_and_body():
    def name(body=b"x", tenant="t", path=CHAT):
        return content_digest(Asked("r", path, {}, body, Tenant(tenant)))

    assert name() == name()
    assert len({name(), name(b"y"), name(tenant="u"), name(path=EMBEDDINGS)}) == 4
    long = [size * b"x" for size in (1 << 20, 1 + (1 << 20))]
    long += [b"y" + long[0][1:], long[0][1:] + b"y"]
    assert len({name(body) for body in long}) == 4


async def test_unrepeatable_request_is_not_sent_twice():
    async with deciding() as here:
        await here.ask(EMBEDDINGS, {"repeatable": False}, {"x-request-id": "r"})
        here.flights.failed(end("r", 0, DIED))
        assert code_of(await here.flights.again("r", 2)) == (503, "no_worker")
        await here.ask(EMBEDDINGS, {"repeatable": False}, {"x-request-id": "s"})
        here.flights.failed(end("s", 0, REFUSED))
        assert isinstance(await here.flights.again("s", 2), Go)


async def test_request_of_another_decider_goes_on():
    async with deciding() as here:
        assert isinstance(await here.flights.again("unknown", 2), Go)
        here.flights.failed(end("unknown", 0, DIED))
        here.flights.ended(end("unknown"))
        assert idle(here)


async def test_decider_is_asked_for_a_priced_path_by_post_alone():
    async with deciding() as here:
        for method in ("GET", "HEAD", "OPTIONS"):
            verdict = await here.decider.decide(Inquiry(method, CHAT, {}, b""))
            assert isinstance(verdict, Refuse) and verdict.status == 405


# -- workers of ours that are late -----------------------------------------------------------------


async def late(here, **headers):
    """A request at `a` without a first byte, about which Envoy asks; the question."""
    await here.ask(headers={"x-request-id": "r", **headers})
    assert here.live.records["r"].decision.worker == "a"
    asking = asyncio.create_task(here.flights.again("r", 2))
    return asking


def patient(**rule):
    return deciding("a", "b", foreign=False, late_s=0.0, **rule)


@pytest.mark.parametrize("why", ["stalled", "silent"])
async def test_late_request_goes_on_once_its_worker_is_lost(why):
    async with patient() as here:
        asking = await late(here)
        waits = here.live.members.waits
        await until(lambda: waits.on("a"))
        assert not asking.done()
        waits.lose("a", why)
        assert isinstance(await asking, Go)
        assert here.scene.ends == [("a", "timeout")]
        assert here.live.records["r"].decision.worker == "b"
        # The worker is not taken for dead.
        assert not here.live.suspects and not len(waits)


async def test_late_request_that_fails_is_checked_for_a_death():
    async with patient() as here:
        asking = await late(here)
        await until(lambda: here.live.members.waits.on("a"))
        here.scene.dead.add("a")
        here.flights.failed(end("r", 0, ("UR",)))
        verdict = await asking
        assert isinstance(verdict, Refuse) and verdict.status == 503
        assert json.loads(verdict.body)["error"]["code"] == "engine_died"


async def test_late_request_waits_no_longer_than_its_client_wants():
    async with patient() as here:
        here.scene.patience = 0.01
        assert isinstance(await (await late(here)), Go)
        assert here.scene.ends == [("a", "deadline")]


async def test_wait_ends_when_a_late_request_was_answered():
    async with patient() as here:
        asking = await late(here)
        await until(lambda: here.live.members.waits.on("a"))
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert not len(here.live.members.waits) and not here.scene.ends


async def test_request_ends_with_its_workers_report_or_soon_after(monkeypatch):
    monkeypatch.setattr("kappa_router.gateway.flights._REPORT_S", 0.05)
    async with patient() as here:
        for request_id in ("r", "s"):
            await here.ask(headers={"x-request-id": request_id})
            here.flights.ended(end(request_id))
            assert request_id in here.flights
        here.live.finished("r")
        assert "r" not in here.flights and "s" in here.flights
        await until(lambda: "s" not in here.flights)
        assert here.live.records["s"].end == "done"

"""Prefill elsewhere: a prefill worker first, then the decode worker, told where the KV is."""

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace

import httpx
import numpy as np
import pytest

import router.live.live_router
from kappa.cost import StepModel, TokenCounts
from kappa.hardware import node_profile
from kappa.protocol import Announcement, EngineDiedError
from kappa.settings.engine import TransferSettings
from router.api.app import Access, make_app
from router.api.auth import Tenants
from router.api.endpoints import KappaIngress
from router.api.metadata import PIN_HEADER
from router.api.prefill import Network, prefill_only
from router.api.render import PromptRenderer
from router.decision import PricedWorker, RouteRequest
from router.index.prefix_hash import secret_from_seed
from router.live.replica_registry import ReplicaRegistry
from router.policies import policy_named
from router.recording import _request_in, _request_out
from router.router import Router, RouterConfig
from tests.router.scripted import ingress_settings
from workers.tiny_model import make_tiny_model

# -- whether it is worth it --------------------------------------------------------------------


pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Using extra keyword arguments"),
]

NETWORK = Network(bytes_per_s=1e9, fixed_s=0.01, min_new_tokens=100)


def said(worker, role="both", dilation=1.0):
    return Announcement(
        worker=worker, model="m",
        node=replace(node_profile("pcie"), dilation=dilation, source="paced"),
        step=StepModel(1e-5, 0.0, 1e-3, 0.0), kv_bytes_per_token=1e5, emulated_model="",
        fingerprint="f", block_tokens=16, device_blocks=100, host_blocks=0, max_batch_tokens=512,
        max_context_tokens=1024, events_endpoint="e", snapshot_endpoint="s", role=role,
    )  # fmt: skip


def offer(ttft_s, cached=0.0, new=1000.0, kappa_crit=10.0):
    return PricedWorker(
        worker="w", node=node_profile("pcie"), counts=TokenCounts(0, int(cached), int(new)),
        kappa_crit=kappa_crit, queue_s=0.0, load_s=0.0, compute_s=ttft_s, ttft_s=ttft_s,
        tpot_impact_s=0.0, backlog_s=0.0, in_flight=0,
    )  # fmt: skip


def test_only_workers_of_role_prefill_never_decode():
    assert prefill_only([said("a"), said("b", "prefill"), said("c", "decode")]) == {"b"}


def test_a_transfer_costs_its_bytes_in_the_nodes_own_time():
    assert NETWORK.seconds(1000, said("a")) == pytest.approx(0.01 + 1000 * 1e5 / 1e9)
    assert NETWORK.seconds(1000, said("a", dilation=10)) == pytest.approx(1.1)


def test_a_compute_bound_prompt_goes_where_its_first_token_comes_sooner():
    assert NETWORK.hands_over(offer(1.0), offer(0.5), 0.4)
    assert not NETWORK.hands_over(offer(1.0), offer(0.5), 0.6)


def test_a_memory_bound_prompt_stays_with_its_kv():
    memory_bound = offer(1.0, cached=20_000.0)
    assert memory_bound.bound == "memory"
    assert not NETWORK.hands_over(memory_bound, offer(0.0), 0.0)


def test_a_short_prompt_is_not_worth_it():
    assert not NETWORK.hands_over(offer(1.0, new=99.0), offer(0.0), 0.0)


def test_what_is_handed_over_need_not_be_computed_and_is_recorded():
    router = Router(RouterConfig(policy=policy_named("ttft"), secret=secret_from_seed("s")))
    router.join(said("a"), 0.0)
    tokens = np.arange(640)
    fresh = router.explain(RouteRequest("r", tokens), 0.0).chosen
    request = RouteRequest("r", tokens, handed_tokens=640)
    handed = router.explain(request, 0.0).chosen
    # An engine computes at least the last token, so the last block is not used.
    assert (handed.counts.device_tokens, handed.counts.new_tokens) == (624, 16)
    assert (fresh.counts.device_tokens, fresh.counts.new_tokens) == (0, 640)
    assert handed.ttft_s < fresh.ttft_s
    recorded = _request_in(_request_out(request))
    assert recorded.handed_tokens == 640


# -- over HTTP ---------------------------------------------------------------------------------


PATH = "/v1/chat/completions"
PLACE = {"do_remote_prefill": True, "transfer_name": "f" * 32, "remote_tokens": 96}
LONG = "hello world " * 200


class Answer(SimpleNamespace):
    usage = None

    def model_dump_json(self):
        return json.dumps({"choices": self.choices})


class Scripted(KappaIngress):
    """The ingress with a script in place of Ray's delivery."""

    def __init__(self, renderer, answers):
        settings = ingress_settings(transfer=TransferSettings(min_new_tokens=64))
        self._model_cards = {"m": None}
        self._wire(settings, renderer)
        self.answers, self.sent = answers, []

    async def _wake_router(self):
        return

    async def _call(self, body, method, headers):
        worker = headers[PIN_HEADER]
        self.sent.append((worker, body.max_tokens, body.stream, body.kv_transfer_params))
        answer = self.answers[worker]
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, asyncio.Event):
            await answer.wait()
        yield answer


def announcement(worker, role, token_s):
    # A slow worker and a fast one, without a cache: every prompt is compute-bound.
    return Announcement(
        worker=worker, model="m", node=replace(node_profile("pcie"), name=worker),
        step=StepModel(token_s, 0.0, 1e-4, 0.0), kv_bytes_per_token=1e3, emulated_model="",
        fingerprint="f", block_tokens=16, device_blocks=1000, host_blocks=0, max_batch_tokens=512,
        max_context_tokens=8192, events_endpoint="tcp://127.0.0.1:9",
        snapshot_endpoint="tcp://127.0.0.1:9", pool=role, role=role,
    ).to_dict()  # fmt: skip


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    return PromptRenderer(str(make_tiny_model(folder, ["hello world " * 20])))


@pytest.fixture
async def serve(renderer, monkeypatch):
    registry = ReplicaRegistry()
    monkeypatch.setattr(router.live.live_router, "REGISTRY", registry)

    async def make(prefill_answer, workers=(("p", "prefill", 1e-4), ("d", "decode", 1e-2))):
        done = Answer(choices=[{"message": {"content": "x"}}])
        ingress = Scripted(renderer, {"p": prefill_answer, "d": done})
        app = make_app(Access(Tenants(), max_body_bytes=1 << 20))
        app.post(PATH)(ingress.chat)
        live = ingress._live()
        registry.publish("x", {name: announcement(name, role, s) for name, role, s in workers})
        async with asyncio.timeout(30.0):
            while len(live.router.workers) < len(workers):
                await asyncio.sleep(0.01)
        return ingress, live, app

    yield make
    registry.publish("x", {})
    await asyncio.sleep(0.05)


async def post(app, text=LONG, headers=None, **more):
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": text}], **more}
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.post(PATH, json=body, headers=headers)


def handed(place=PLACE):
    return Answer(choices=[{"message": {"content": "x"}}], kv_transfer_params=place)


def counted(live, where):
    lines = live.metrics.exposition().decode().splitlines()
    (line,) = [line for line in lines if f'kappa_prefills_total{{where="{where}"}}' in line]
    return float(line.split()[-1])


async def test_a_long_prompt_is_computed_elsewhere_and_its_kv_taken_over(serve):
    ingress, live, app = await serve(handed())
    answer = await post(app)
    assert answer.status_code == 200 and answer.headers["x-kappa-node"] == "d"
    (first, one, stream, asked), (second, nine, _, place) = ingress.sent
    assert (first, one, stream, asked["do_remote_decode"]) == ("p", 1, False, True)
    assert (second, nine, place) == ("d", 9, PLACE)
    assert counted(live, "handed_over") == 1
    assert live.router.reservations == 0
    prefill, decode = live.records.values()
    assert (prefill.end, decode.end) == ("done", "done")
    # What comes along need not be computed: that is what the decision was priced by.
    assert decode.decision.chosen.counts.device_tokens > 300
    assert decode.decision.chosen.ttft_s < prefill.decision.chosen.compute_s * 10


async def test_a_short_prompt_stays(serve):
    ingress, live, app = await serve(handed())
    answer = await post(app, "hello")
    assert answer.status_code == 200
    assert [worker for worker, *_ in ingress.sent] == ["d"]
    assert ingress.sent[0][3] is None and counted(live, "kept") == 1


async def test_a_prefill_worker_decodes_for_nobody(serve):
    _, live, app = await serve(handed(), workers=(("p", "prefill", 1e-4),))
    answer = await post(app)
    assert answer.status_code == 503
    assert live.router.reservations == 0


async def test_a_slower_prefill_worker_is_left_alone(serve):
    slow = (("p", "prefill", 1e-2), ("d", "both", 1e-4))
    ingress, _, app = await serve(handed(), workers=slow)
    await post(app)
    assert [worker for worker, *_ in ingress.sent] == ["d"]


@pytest.mark.parametrize("answer", [RuntimeError("gone"), handed(None)])
async def test_what_fails_elsewhere_is_computed_here(serve, answer):
    ingress, live, app = await serve(answer)
    told = await post(app)
    assert told.status_code == 200
    assert [worker for worker, *_ in ingress.sent] == ["p", "d"]
    assert ingress.sent[1][3] is None
    assert counted(live, "failed") == 1 and live.router.reservations == 0


async def test_a_client_cannot_say_where_an_engine_reads(serve):
    ingress, _, app = await serve(handed(), workers=(("d", "both", 1e-4),))
    for name in ("kv_transfer_params", "ec_transfer_params"):
        answer = await post(app, **{name: PLACE})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == name
    assert ingress.sent == []


async def test_a_deadline_that_passes_in_a_prefill_says_nothing_of_its_worker(serve):
    _, live, app = await serve(asyncio.Event())
    for _ in range(6):
        answer = await post(app, headers={"x-kappa-deadline-ms": "150"})
        assert answer.status_code == 504
    breaker = live.members.breakers.state("p", live.now_s())
    assert (breaker.standing, breaker.failures) == ("closed", 0)
    assert {record.end for record in live.records.values()} == {"deadline"}
    assert live.router.reservations == 0 and len(live.members.waits) == 0


async def test_a_prefill_worker_that_is_lost_is_not_waited_for(serve):
    ingress, live, app = await serve(asyncio.Event())
    asking = asyncio.create_task(post(app))
    async with asyncio.timeout(20.0):
        while not ingress.sent:
            await asyncio.sleep(0.01)
        assert live.members.waits.lose("p", "silent", begun=False) == 1
        answer = await asking
    assert answer.status_code == 200 and answer.headers["x-kappa-node"] == "d"
    assert counted(live, "failed") == 1
    assert live.router.reservations == 0 and len(live.members.waits) == 0


async def test_a_clients_id_cannot_be_that_of_anothers_prefill(serve):
    ingress, live, app = await serve(handed())
    ingress.answers["d"] = asyncio.Event()
    asking = [asyncio.create_task(post(app, "hello", headers={"x-request-id": "x-prefill"}))]
    async with asyncio.timeout(20.0):
        while not ingress.sent:
            await asyncio.sleep(0.01)
        asking.append(asyncio.create_task(post(app, headers={"x-request-id": "x"})))
        while [worker for worker, *_ in ingress.sent] != ["d", "p", "d"]:
            await asyncio.sleep(0.01)
    assert live.router.in_flight_on("d") == 2
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    assert live.router.reservations == 0


async def test_a_request_that_was_alone_in_a_prefill_engine_that_died_goes_nowhere_else(serve):
    ingress, live, app = await serve(EngineDiedError("p"))
    answer = await post(app)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_died")
    assert [worker for worker, *_ in ingress.sent] == ["p"]
    assert live.router.reservations == 0 and len(live.members.waits) == 0


async def test_one_that_was_among_others_there_is_tried_once_more_and_no_third_time(serve):
    workers = [("p", "prefill", 1e-4), ("d", "decode", 1e-2), ("e", "decode", 1e-2)]
    ingress, live, app = await serve(EngineDiedError("p"), workers)
    ingress.answers["d"] = ingress.answers["e"] = EngineDiedError("decoder")
    for worker, *_ in workers:
        live.suspects.ended(worker, live.now_s())
    answer = await post(app)
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "killed_an_engine")
    first, second = (worker for worker, *_ in ingress.sent)
    assert first == "p" and second in "de"
    again = await post(app)
    assert again.json()["error"]["code"] == "killed_an_engine" and len(ingress.sent) == 2
    assert live.router.reservations == 0 and len(live.members.waits) == 0

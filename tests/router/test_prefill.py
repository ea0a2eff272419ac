"""Prefill elsewhere: a prefill worker first, then the decode worker, which is sent where the KV
is."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from kappa.cost import StepModel, TokenCounts
from kappa.hardware import node_profile
from kappa.protocol import EngineDiedError
from kappa.settings.engine import TransferSettings
from kappa_router.cluster.prefill import hands_over
from kappa_router.decision import PricedWorker, RouteRequest
from kappa_router.recording import _request_in, _request_out
from tests.router import building
from tests.router.patience import until
from tests.router.scripted import Whole, announcement, code, crowd

pytestmark = pytest.mark.ray

# -- whether it is worth it --------------------------------------------------------------------

NETWORK = TransferSettings(net_bytes_per_s=1e9, fixed_s=0.01, min_new_tokens=100)


def priced(ttft_s, cached=0.0, new=1000.0, load_s=0.0):
    return PricedWorker(
        worker="w", node=node_profile("pcie"), counts=TokenCounts(0, int(cached), int(new)),
        load_token_s=1e-4, queue_s=0.0, load_s=load_s, compute_s=ttft_s - load_s, ttft_s=ttft_s,
        tpot_impact_s=0.0, backlog_s=0.0, in_flight=0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("here", "there", "dilation", "tokens", "worth_it"),
    [
        # 1000 tokens x 1e5 bytes over 1e9 bytes/s, and 0.01 s: 0.11 s on top of `there`.
        (priced(1.0), priced(0.88), 1, 1000, True),
        (priced(1.0), priced(0.9), 1, 1000, False),
        (priced(1.0), priced(0.5), 10, 1000, False),  # 1.1 s in the node's own time
        (priced(1.0), priced(0.5), 4, 1000, True),
        (priced(1.0, cached=5_000.0, load_s=0.5), priced(0.0), 1, 0, False),  # memory-bound: stays
        (priced(1.0, new=99.0), priced(0.0), 1, 0, False),
        (priced(1.0, new=100.0), priced(0.0), 1, 0, True),
    ],
)
def test_prompt_is_handed_over_where_its_first_token_is_sooner(
    here, there, dilation, tokens, worth_it
):
    node = replace(node_profile("pcie"), dilation=dilation, source="paced")
    to = building.announcement("w", node, kv_bytes_per_token=1e5)
    assert hands_over(NETWORK, here, there, to, tokens) is worth_it


def test_handed_tokens_need_no_computing_and_are_recorded():
    router, tokens = building.router("a"), np.arange(640)
    fresh = router.explain(RouteRequest("r", tokens), 0.0).chosen
    request = RouteRequest("r", tokens, handed_tokens=640)
    handed = router.explain(request, 0.0).chosen
    # An engine computes at least the last token, so the last block is not used.
    assert (handed.counts.device_tokens, handed.counts.cached_tokens) == (0, 624)
    assert handed.counts.new_tokens == 16
    assert (fresh.counts.device_tokens, fresh.counts.new_tokens) == (0, 640)
    assert handed.ttft_s < fresh.ttft_s
    assert _request_in(_request_out(request)).handed_tokens == 640


# -- over HTTP ---------------------------------------------------------------------------------

PLACE = {"do_remote_prefill": True, "transfer_name": "f" * 32, "remote_tokens": 96}


CHOICES = [{"message": {"content": "x"}}]


@pytest.fixture
def cluster(serve):
    """Makes clusters of a slow decoder `d` and others; `answers` holds what each answers."""

    async def make(prefill_answer, roles=(("p", "prefill", 1e-4), ("d", "decode", 1e-2))):
        answers = {"p": prefill_answer, "d": Whole({"choices": CHOICES})}

        async def script(worker):
            answer = answers[worker]
            if isinstance(answer, Exception):
                raise answer
            if isinstance(answer, asyncio.Event):
                await answer.wait()
            yield answer

        # Without a cache every prompt is compute-bound.
        workers = {
            name: announcement(
                name, 1000, step=StepModel(token_s, 0.0, 1e-4, 0.0), kv_bytes_per_token=1e3,
                max_context_tokens=8192, pool=role, role=role,
            )
            for name, role, token_s in roles
        }  # fmt: skip
        here = await serve(script, workers, transfer=TransferSettings(min_new_tokens=64))
        here.answers = answers
        return here

    return make


def ask(here, text="hello world " * 200, **more):
    said = [{"role": "user", "content": text}]
    return here.ask(messages=said, stream=False, max_tokens=9, **more)


def handed(place=PLACE):
    return Whole({"choices": CHOICES, "kv_transfer_params": place})


def counted(live, where):
    return building.sample(live, f'kappa_prefills_total{{where="{where}"}}')


async def check_nothing_is_left(here):
    await here.idle()
    assert len(here.live.members.waits) == 0


async def test_long_prompt_is_computed_elsewhere_and_its_kv_taken(cluster):
    here = await cluster(handed())
    answer = await ask(here)
    assert answer.status_code == 200 and answer.headers["x-kappa-node"] == "d"
    first, second = here.engines.bodies
    assert here.engines.sent == ["p", "d"]
    assert (first.max_tokens, first.stream, second.max_tokens) == (1, None, 9)
    assert first.kv_transfer_params["do_remote_decode"] and second.kv_transfer_params == PLACE
    assert counted(here.live, "handed_over") == 1
    await check_nothing_is_left(here)
    prefill, decode = here.live.records.values()
    assert (prefill.end, decode.end) == ("done", "done")
    # What comes along need not be computed: that is what the decision was priced by.
    assert decode.decision.chosen.counts.cached_tokens > 300
    assert decode.decision.chosen.ttft_s < prefill.decision.chosen.compute_s * 10


async def test_short_prompt_stays(cluster):
    here = await cluster(handed())
    assert (await ask(here, "hello")).status_code == 200
    assert here.engines.sent == ["d"] and counted(here.live, "kept") == 1
    assert here.engines.bodies[0].kv_transfer_params is None


async def test_prefill_worker_never_decodes_and_a_slower_one_gets_none(cluster):
    here = await cluster(handed(), (("p", "prefill", 1e-4),))
    assert (await ask(here)).status_code == 503
    await check_nothing_is_left(here)
    here = await cluster(handed(), (("p", "prefill", 1e-2), ("d", "both", 1e-4)))
    await ask(here)
    assert here.engines.sent == ["d"]


@pytest.mark.parametrize("answer", [RuntimeError("gone"), handed(None)])
async def test_failed_prefill_is_computed_at_the_decoder(cluster, answer):
    here = await cluster(answer)
    assert (await ask(here)).status_code == 200
    assert here.engines.sent == ["p", "d"]
    assert here.engines.bodies[1].kv_transfer_params is None
    assert counted(here.live, "failed") == 1
    await check_nothing_is_left(here)


async def test_deadline_in_a_prefill_says_nothing_of_its_worker(cluster):
    here = await cluster(asyncio.Event())
    for _ in range(6):
        answer = await ask(here, headers={"x-kappa-deadline-ms": "150"})
        assert answer.status_code == 504
    breaker = here.live.members.breakers.state("p", here.live.now_s())
    assert (breaker.standing, breaker.failures) == ("closed", 0)
    assert {record.end for record in here.live.records.values()} == {"deadline"}
    await check_nothing_is_left(here)


async def test_prefill_worker_that_is_lost_is_not_waited_for(cluster):
    here = await cluster(asyncio.Event())
    asking = asyncio.create_task(ask(here))
    await until(lambda: here.engines.sent)
    here.live.members.waits.lose("p", "silent")
    answer = await asking
    assert answer.status_code == 200 and answer.headers["x-kappa-node"] == "d"
    assert counted(here.live, "failed") == 1
    await check_nothing_is_left(here)


async def test_clients_id_cannot_be_that_of_anothers_prefill(cluster):
    here = await cluster(handed())
    here.answers["d"] = asyncio.Event()
    asking = [asyncio.create_task(ask(here, "hello", headers={"x-request-id": "x-prefill"}))]
    await until(lambda: here.engines.sent)
    asking.append(asyncio.create_task(ask(here, headers={"x-request-id": "x"})))
    await until(lambda: here.engines.sent == ["d", "p", "d"])
    assert here.live.router.in_flight_on("d") == 2
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    await here.idle()


async def test_request_alone_in_a_dead_prefill_engine_goes_nowhere(cluster):
    here = await cluster(EngineDiedError("p"))
    assert code(await ask(here), 503) == "engine_died"
    assert here.engines.sent == ["p"]
    await check_nothing_is_left(here)


async def test_request_among_others_there_is_tried_only_once_more(cluster):
    workers = [("p", "prefill", 1e-4), ("d", "decode", 1e-2), ("e", "decode", 1e-2)]
    here = await cluster(EngineDiedError("p"), workers)
    here.answers["d"] = here.answers["e"] = EngineDiedError("decoder")
    crowd(here.live)
    assert code(await ask(here), 422) == "killed_an_engine"
    first, second = here.engines.sent
    assert first == "p" and second in "de"
    assert code(await ask(here)) == "killed_an_engine" and len(here.engines.sent) == 2
    await check_nothing_is_left(here)

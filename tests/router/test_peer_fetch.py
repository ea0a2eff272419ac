"""A request that is sent where its prefix has to come from a peer first."""

from kappa.cost import StepModel
from kappa.protocol import WorkerReport
from tests.router.scripted import Whole, announcement

ADDRESS = "127.0.0.1:4711/secret"


async def pair(serve, failing=()):
    """Workers: `a` computes slowly and holds the prompt, `b` is quick and has room for copies."""

    async def script(worker):
        if worker in failing:
            raise RuntimeError("gone")
        yield Whole({"choices": []})

    workers = {
        name: announcement(
            name, 1000, step=StepModel(token_s, 0.0, 1e-4, 0.0), kv_bytes_per_token=1e3,
            max_context_tokens=8192, net_bytes_per_s=1e12, peer=f"{name}:{ADDRESS}",
        )
        for name, token_s in (("a", 1e-2), ("b", 1e-4))
    }  # fmt: skip
    here = await serve(script, workers, policy="priced_fetch")
    router = here.live.router
    estimates, price = [], router._estimate
    router._estimate = lambda *asked: estimates.append(price(*asked)) or estimates[-1]
    await ask(here)
    await here.idle()
    hashes = estimates[0].prefix_hashes
    router.index.hold("a", "host", hashes)
    router.report(WorkerReport("b", here.live.now_s(), host_spare_blocks=1000), here.live.now_s())
    here.engines.bodies.clear()
    here.engines.sent.clear()
    return here


def ask(here):
    said = [{"role": "user", "content": "hello world " * 200}]
    return here.ask(messages=said, stream=False, max_tokens=9)


async def test_worker_is_sent_its_peer_and_the_tokens_to_read(serve):
    here = await pair(serve)
    answer = await ask(here)
    assert answer.headers["x-kappa-reason"] == "peer_fetch" and here.engines.sent == ["b"]
    (body,) = here.engines.bodies
    *_, record = here.live.records.values()
    counts, fetch = record.decision.chosen.counts, record.decision.fetch
    assert fetch.tokens > 300 and counts.device_tokens == 0
    assert body.kv_transfer_params == {
        "kappa_peer": {"endpoint": f"a:{ADDRESS}", "start": 0, "stop": fetch.tokens}
    }


async def test_retry_elsewhere_takes_nothing_of_the_first_try_along(serve):
    failing = set()
    here = await pair(serve, failing)
    failing.add("b")
    assert (await ask(here)).status_code == 200
    assert here.engines.sent == ["b", "a"]
    assert [body.kv_transfer_params for body in here.engines.bodies][1] is None


async def test_addresses_of_tiers_are_shown_to_no_client(serve):
    here = await pair(serve)
    answer = await ask(here)
    shown = (await here.client.get("/v1/nodes")).text + (
        await here.client.get("/v1/decisions")
    ).text
    assert "secret" not in shown + answer.text + str(answer.headers)

"""Several models, and adapters of one, behind one router and one endpoint."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kappa.protocol import Arrival, EngineDiedError, WorkerReport
from kappa_router.api.render import SHORT_BYTES, PromptRenderer, Tokenizing
from kappa_router.api.request import EndpointModel
from kappa_router.api.request_body import RequestBody
from kappa_router.api.tenants import Tenant
from kappa_router.config import RouterConfig
from kappa_router.decision import MismatchError, NoWorkerError, RouteRequest
from kappa_router.index.prefix_hash import salt_of
from kappa_router.policy import policy_named
from kappa_router.recording import RecordedRouter, replay
from kappa_router.router import Router
from kappa_workers.tiny_model import make_tiny_model
from tests.router import scripted
from tests.router.building import NEVER, SIZE, announcement, ask, prompt, router, stored

SMALL = {"model": "small", "fingerprint": "s"}
LARGE = {"model": "large", "fingerprint": "l", "kv_bytes_per_token": 327680.0}
PROMPT = prompt(100 * SIZE)


def two_models(**options):
    """Workers s0 and s1 of one model, l0 of another."""
    return router(
        announcement("s0", **SMALL), announcement("s1", **SMALL), announcement("l0", **LARGE),
        calibrate=False, **options,
    )  # fmt: skip


def of(model, name="r", **options):
    return RouteRequest(name, PROMPT, max_tokens=8, model=model, **options)


def workers_priced(made, request):
    return {candidate.worker for candidate in made.explain(request, 1.0).candidates}


# -- the pure router ----------------------------------------------------------------------------


def test_prefix_of_one_model_is_not_counted_for_another():
    made = two_models()
    made.blocks([stored("s0", PROMPT)])
    assert made.explain(of("large"), 1.0).chosen.counts.device_tokens == 0
    assert made.explain(of("small"), 1.0).worker == "s0"
    made.blocks([stored("l0", PROMPT)])
    made.leave("s0")
    assert made.explain(of("small"), 1.0).chosen.counts.device_tokens == 0
    assert made.explain(of("large"), 1.0).chosen.counts.device_tokens == 99 * SIZE


def test_blocks_held_are_known_of_every_model():
    made = two_models()
    made.blocks([stored("s0", PROMPT), stored("l0", PROMPT)])
    none = {"device": 0, "host": 0, "disk": 0}
    all_of_it = {**none, "device": 100}
    assert made.held_blocks() == {"s0": all_of_it, "s1": none, "l0": all_of_it}


@pytest.mark.parametrize("forecast", [0, 4])
def test_workers_of_the_model_alone_are_priced_even_when_busy(forecast):
    made = two_models(forecast_workers=forecast)
    for i in range(40):
        assert made.route(of("small", f"r{i}"), 1.0).worker in ("s0", "s1")
    assert workers_priced(made, of("small")) == {"s0", "s1"}
    assert workers_priced(made, of("large")) == {"l0"}
    assert made.in_flight_on("l0") == 0


def test_error_names_the_model_without_a_worker():
    made = two_models()
    made.leave("l0")
    with pytest.raises(NoWorkerError, match=r"no worker of model large is ready \(0 known"):
        made.route(of("large"), 1.0)
    with pytest.raises(NoWorkerError, match=r"of model small is ready \(2 known, 2 excluded"):
        made.route(of("small", exclude=frozenset(("s0", "s1"))), 1.0)
    with pytest.raises(NoWorkerError, match="of model other"):
        made.route(of("other"), 1.0)
    with pytest.raises(NoWorkerError, match="no worker is ready"):
        made.route(of(""), 1.0)
    assert made.reservations == 0


def test_request_that_names_no_model_goes_to_the_only_one():
    made = router("a")
    assert made.route(of(""), 1.0).worker == made.route(of("m", "s"), 1.0).worker == "a"


def test_worker_is_priced_by_its_own_model():
    made = two_models()
    for worker in ("s0", "l0"):
        made.blocks([replace(stored(worker, PROMPT), tier="host")])
    small, large = (made.explain(of(model), 1.0).chosen for model in ("small", "large"))
    assert small.counts.cached_tokens == large.counts.cached_tokens == 99 * SIZE
    # Bytes of a token over the same link.
    assert large.load_s / small.load_s == pytest.approx(327680 / 131072)


def test_blocks_may_differ_between_models_not_within_one():
    made = two_models()
    made.join(announcement("x0", model="x", fingerprint="x", block_tokens=4 * SIZE), 0.0)
    made.blocks(
        [replace(stored("x0", PROMPT), block_tokens=4 * SIZE, engine_hashes=tuple(range(25)))]
    )
    assert made.explain(of("x"), 1.0).chosen.counts.device_tokens == 24 * 4 * SIZE
    with pytest.raises(MismatchError, match="fingerprint s, the pool l"):
        made.join(announcement("l1", **{**LARGE, "fingerprint": "s"}), 0.0)
    with pytest.raises(MismatchError, match="blocks of 32"):
        made.join(announcement("l1", **LARGE, block_tokens=32), 0.0)
    assert workers_priced(made, of("large")) == {"l0"}


def test_worker_that_announces_another_model_is_refused():
    made = two_models()
    with pytest.raises(MismatchError, match="announces model large, and was of model small"):
        made.join(announcement("s0", **LARGE), 1.0)


def test_requests_of_other_deciders_count_for_their_model():
    made = two_models()
    made.report(WorkerReport("l0", 1.0, arrived=(Arrival("other", new_tokens=4000),)), 1.0)
    made.route(of("small", "mine"), 1.0)
    made.tokens("mine", 100)
    made.release("mine", 2.0)
    assert made.models["small"].outputs.guess(0) == 100
    assert made.models["large"].outputs.guess(0) != 100
    assert made.remote_in_flight_on("l0") == 1


def test_admission_uses_the_demand_of_its_own_model():
    made = two_models(admission=True)
    made.route(of("small"), 1.0)
    assert len(made.models["small"].demand._last) == 1
    assert len(made.models["large"].demand._last) == 0


def test_adapters_prefix_is_neither_the_bases_nor_anothers():
    made = router("a")
    salts = {name: salt_of("tenant", name) for name in (None, "one", "two")}
    made.blocks([replace(stored("a", PROMPT), salt=salts["one"])])
    found = {
        name: made.explain(of("", salt=salt), 1.0).chosen.counts.device_tokens
        for name, salt in salts.items()
    }
    assert found == {None: 0, "one": 99 * SIZE, "two": 0}


def test_log_of_two_models_replays_to_the_same_decisions():
    log = []
    config = RouterConfig(policy=policy_named("priced"), secret=7)
    recorded = RecordedRouter(config, log.append)
    for worker, model in (("s0", SMALL), ("l0", LARGE)):
        recorded.join(announcement(worker, **model), 0.0)
    for i, model in enumerate(("small", "large", "large", "none")):
        try:
            recorded.route(of(model, f"r{i}"), 1.0)
        except NoWorkerError:
            assert model == "none"
    pairs = replay(log, Router(config))
    assert [then.get("worker") for then, _ in pairs] == ["s0", "l0", "l0", None]
    assert all(then == now for then, now in pairs)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["small", "large"]), st.integers(0, 3)), max_size=12))
def test_request_never_meets_workers_or_prefixes_of_another(asked):
    made = two_models(stale_after_s=NEVER)
    held: dict[str, set[int]] = {"small": set(), "large": set()}
    for i, (model, seed) in enumerate(asked):
        request = replace(ask(f"r{i}", tokens=10 * SIZE + 1, seed=seed), model=model)
        decision = made.route(request, float(i))
        assert decision.worker.startswith(model[0])
        if seed not in held[model]:
            assert decision.chosen.counts.device_tokens == 0
        held[model].add(seed)
        made.blocks([stored(decision.worker, request.token_ids)])


# -- the endpoint -------------------------------------------------------------------------------

MODELS = (EndpointModel("small", "", ("fine",)), EndpointModel("large", ""))
WORKERS = {
    "s0": scripted.announcement("s0", model="small", pool="s"),
    "l0": scripted.announcement("l0", model="large", fingerprint="l", pool="l"),
}


@pytest.mark.ray
async def test_body_model_chooses_workers_and_adapters_their_base(serve):
    engines, _, here = await serve(workers=WORKERS, models=MODELS)
    for model in ("small", "fine", "large", "small"):
        assert (await scripted.post(here, stream=True, model=model)).status_code == 200
    assert engines.sent == ["s0", "s0", "l0", "s0"]
    assert [body.model for body in engines.bodies] == ["small", "fine", "large", "small"]
    refused = await scripted.post(here, model="huge")
    assert scripted.code(refused, 404) == "model_not_found"
    assert "this cluster serves small, fine, large" in refused.json()["error"]["message"]
    body = {name: value for name, value in scripted.BODY.items() if name != "model"}
    unnamed = await here.client.post(scripted.PATH, json=body)
    assert scripted.code(unnamed, 400) == "invalid_value"
    assert "name one of small, fine, large" in unnamed.json()["error"]["message"]
    nodes = (await scripted.get(here, "/v1/nodes")).json()["nodes"]
    assert {row["node"]: row["model"] for row in nodes} == {"s0": "small", "l0": "large"}
    listed = (await scripted.get(here, "/v1/models")).json()["data"]
    assert [card["id"] for card in listed] == ["small", "fine", "large"]
    await here.idle()


@pytest.mark.ray
async def test_model_without_a_live_worker_is_503_and_asks_no_other(serve):
    async def script(worker):
        if worker == "l0":
            raise EngineDiedError
        async for item in scripted.words(worker):
            yield item

    engines, _, here = await serve(script, workers=WORKERS, models=MODELS)
    assert (await scripted.post(here, model="large")).status_code == 503
    await here.idle()
    answer = await scripted.post(here, model="large")
    assert scripted.code(answer, 503) == "no_worker"
    assert "model large" in answer.json()["error"]["message"]
    assert engines.sent == ["l0"]
    assert (await scripted.post(here, stream=True, model="small")).status_code == 200


@pytest.mark.ray
async def test_rays_rule_draws_among_the_workers_of_the_model(serve):
    engines, _, here = await serve(workers=WORKERS, models=MODELS, mode="shadow")
    for number in range(8):
        answer = await scripted.post(here, stream=True, model="large", max_tokens=number + 1)
        assert answer.status_code == 200
    assert set(engines.sent) == {"l0"}


@pytest.mark.ray
async def test_limits_of_another_models_workers_do_not_count(serve):
    workers = {**WORKERS, "l0": {**WORKERS["l0"], "max_context_tokens": 16}}
    _, _, here = await serve(workers=workers, models=MODELS)
    long = "hello world " * 40
    message = [{"role": "user", "content": long}]
    refused = await scripted.post(here, model="large", messages=message)
    assert scripted.code(refused, 400) == "context_length_exceeded"
    assert "context is 16 tokens" in refused.json()["error"]["message"]
    answer = await scripted.post(here, stream=True, model="small", messages=message)
    assert answer.status_code == 200


@pytest.mark.ray
async def test_models_tokenize_their_own_way_in_one_process(tmp_path):
    texts = {"small": "hello world ", "large": "quite other words, 12345 "}
    renderers = {
        name: PromptRenderer(str(make_tiny_model(tmp_path / name, [text * 20])))
        for name, text in texts.items()
    }
    tokenizing = Tokenizing(renderers)
    body = RequestBody.completion({"model": "small", "prompt": "hello world, other words"})
    try:
        found = {}
        for name, renderer in renderers.items():
            for size in (1, SHORT_BYTES + 1):
                prompt = await tokenizing.tokens(name, body, size, Tenant("alice"), None)
                found[name, size] = prompt.token_ids.tolist()
            assert found[name, 1] == found[name, SHORT_BYTES + 1]
            assert found[name, 1] == renderer.render(body).token_ids.tolist()
        assert found["small", 1] != found["large", 1]
    finally:
        tokenizing.close()

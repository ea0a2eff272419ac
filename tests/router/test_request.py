"""What a request asks for and is held to: salts, deadlines, approximation, who can serve it."""

import itertools
import math
from dataclasses import replace

import pytest
from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest
from starlette.requests import Request

from kappa.hardware import node_profile
from kappa.settings.routing import NamedObjective, RouterSettings
from kappa_router.api.request import (
    ApiRequest,
    Deadline,
    EndpointModel,
    Inbound,
    approx_allowed,
    cache_salt,
    deadline_of,
    exact_workers,
    is_approximate,
    late_workers,
    objective_of,
    unfit_workers,
)
from kappa_router.api.request_body import RequestBody
from kappa_router.api.tenants import Tenant
from kappa_router.index.prefix_hash import PrefixHasher, salt_of
from tests.router.building import announcement, refused
from tests.router.offering import estimates

pytestmark = pytest.mark.ray


# -- bodies and headers ----------------------------------------------------------------------------


def as_vllm(body):
    """A body by vLLM's own schema."""
    schema = ChatCompletionRequest if body.is_chat else CompletionRequest
    return schema.model_validate_json(body.json())


def request(headers=None, *, completion=False, **fields):
    given = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    http = Request({"type": "http", "headers": given, "state": {"inbound": Inbound("r", 0.0)}})
    if completion:
        return ApiRequest.of(http, RequestBody.completion({"model": "m", "prompt": "x", **fields}))
    messages = [{"role": "user", "content": "x"}]
    return ApiRequest.of(http, RequestBody.chat({"model": "m", "messages": messages, **fields}))


def test_load_plan_is_asked_for_by_a_header():
    assert request({"x-kappa-plan": " recompute "}).load_plan == "recompute"
    assert request().load_plan == ""


def test_conversation_is_named_by_header_then_key_then_user():
    named = {"prompt_cache_key": "key", "user": "u"}
    assert request({"x-session-id": "s"}, **named).conversation == "s"
    assert request(**named).conversation == "key"
    assert request(user="u").conversation == "u"
    assert request().conversation == "r"


def test_later_bound_on_generated_tokens_counts():
    assert request().body.max_tokens == 0
    assert request(max_tokens=5).body.max_tokens == 5
    assert request(max_tokens=5, max_completion_tokens=7).body.max_tokens == 7
    assert request(completion=True, max_tokens=5).body.max_tokens == 5
    plain = request(completion=True)
    assert plain.body.max_tokens == as_vllm(plain.body).max_tokens, "as vLLM has it by default"


@pytest.mark.parametrize(
    ("completion", "fields", "reads"),
    [
        (False, {}, True),
        (False, {"logprobs": True, "top_logprobs": 2}, True),
        (False, {"prompt_logprobs": 0}, False),
        (False, {"echo": True, "logprobs": True, "top_logprobs": 2}, False),
        (True, {"logprobs": 2}, True),
        (True, {"echo": True}, True),
        (True, {"echo": True, "logprobs": 2}, False),
    ],
)
def test_prompt_whose_logprobs_are_wanted_reads_no_cache(completion, fields, reads):
    made = request(completion=completion, cache_salt="mine", **fields)
    assert (made.salt == salt_of("mine")) is reads
    skips = as_vllm(made.body).to_sampling_params(4, {}).skip_reading_prefix_cache
    assert bool(skips) is not reads, "as vLLM does"


@pytest.mark.parametrize(
    ("tenant", "fields", "granted"),
    [
        (Tenant(), {}, 0),
        (Tenant(), {"priority": 0}, 0),
        (Tenant(priority=2, may_ask=(0, 5)), {}, 2),
        (Tenant(priority=2, may_ask=(0, 5)), {"priority": 0}, 0),
        (Tenant(priority=2, may_ask=(0, 5)), {"priority": 5}, 5),
    ],
)
@pytest.mark.parametrize("completion", [False, True])
def test_engine_is_sent_the_class_that_a_tenant_may_have(tenant, fields, granted, completion):
    made = request(completion=completion, **fields)
    made.tenant = tenant
    made.prepare([EndpointModel("m", "m")], RouterSettings())
    assert made.body.priority == granted


@pytest.mark.parametrize("asked", [0, 1, 9])
def test_class_that_a_tenant_may_not_ask_for_is_refused(asked):
    made = request(priority=asked)
    made.tenant = Tenant("bulk", priority=5, may_ask=(7,))
    error = refused(made.prepare, [EndpointModel("m", "m")], RouterSettings())
    assert (error.status, error.param) == (400, "priority")
    assert f"it is {asked}, and tenant 'bulk' may ask for 5, 7" in str(error)


# -- objectives ------------------------------------------------------------------------------------

NAMED = RouterSettings(
    objectives={"chat": NamedObjective(ttft_s=0.3), "bulk": NamedObjective(priority=5)}
)
BOTH, SLO = Tenant("both", may_ask=(5, 7)), "x-slo-ttft-ms"


@pytest.mark.parametrize(
    ("objective", "slo", "requested", "granted"),
    [
        ("", "", None, (0, 0.0)),
        ("chat", "", None, (0, 0.3)),
        ("bulk", "", None, (5, 0.0)),
        ("bulk", "", 7, (7, 0.0)),
        (" chat ", " 250.5 ", None, (0, 0.2505)),
        ("", "60000", 0, (0, 60.0)),
    ],
)
def test_objective_is_of_its_header_settings_and_body(objective, slo, requested, granted):
    headers = {"x-gateway-inference-objective": objective, SLO: slo}
    assert objective_of(headers, NAMED, BOTH, requested) == granted


@pytest.mark.parametrize(
    "slo",
    [
        "nan",
        "inf",
        "-1",
        "0",
        "0.0",
        "1e3",
        "60001",
        "9" * 400,
        "1,5",
        "soon",
        "+5",
        "\u0665",
        "5ms",
    ],
)
def test_slo_that_is_no_time_is_refused(slo):
    error = refused(objective_of, {SLO: slo}, RouterSettings(), Tenant())
    assert (error.status, error.param) == (400, SLO)
    assert "up to 60000 (router.longest_ttft_s)" in str(error)


def test_objective_that_is_not_to_be_had_is_refused():
    named = "x-gateway-inference-objective"
    error = refused(objective_of, {named: "batch"}, NAMED, Tenant())
    assert (error.status, error.param) == (400, named) and "name one of chat, bulk" in str(error)
    error = refused(objective_of, {named: "bulk"}, NAMED, Tenant("small"))
    assert error.param == named and "tenant 'small' may ask for 0" in str(error)


def test_objectives_are_not_read_where_there_are_none():
    headers = {"x-gateway-inference-objective": "any", SLO: "nan"}
    assert objective_of(headers, RouterSettings(longest_ttft_s=0), Tenant()) == (0, 0.0)


# -- deadlines -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "allowed_s"), [("1", 0.001), (" 1500 ", 1.5), ("86400000", 86400)]
)
def test_deadline_is_whole_milliseconds_from_arrival(text, allowed_s):
    deadline = deadline_of(text, 10.0)
    assert deadline == Deadline(10.0, allowed_s) and deadline.at_s == 10.0 + allowed_s
    assert deadline_of("", 1.0) is None and deadline_of("  ", 1.0) is None


@pytest.mark.parametrize(
    "text",
    [
        "0", "-5", "1.5", "1e3", "soon", "0x10", "1 2", "86400001", "9" * 400, "²", "١", "+5",
        "1_000",
    ],
)  # fmt: skip
def test_malformed_deadline_is_refused_with_the_right_form(text):
    error = refused(deadline_of, text, 0.0)
    assert (error.status, error.param) == (400, "x-kappa-deadline-ms")
    assert "whole milliseconds" in error.message and text not in error.message.split()


def test_deadline_has_passed_from_its_moment_on():
    deadline = Deadline(10.0, 2.0)
    deadline.check(11.999)
    error = refused(deadline.check, 12.0)
    assert (error.status, error.code, error.retry_after_s) == (504, "deadline_exceeded", None)


def priced(*ttft_s):
    rows = ({"ttft_s": ttft, "tpot_s": 0.1} for ttft in ttft_s)
    return estimates(*rows, expected_output_tokens=10)


def test_workers_predicted_too_late_are_named():
    made = priced(1.0, 3.0, 1.99)
    assert late_workers(Deadline(0.0, 2.5), made, 0.5, streamed=True) == {made.workers[1]}
    assert late_workers(Deadline(0.0, 9.0), made, 0.5, streamed=True) == frozenset()
    # An answer that is not streamed is there with its last token: 10 of 0.1 s later.
    made = priced(1.0, 1.5)
    assert late_workers(Deadline(0.0, 2.2), made, 0.0, streamed=True) == frozenset()
    assert late_workers(Deadline(0.0, 2.2), made, 0.0, streamed=False) == {made.workers[1]}


def test_late_workers_refuses_when_all_are_late():
    error = refused(late_workers, Deadline(0.0, 2.0), priced(3.0, 2.5), 1.0, streamed=True)
    assert (error.status, error.code) == (429, "deadline_unmeetable")
    assert error.retry_after_s == pytest.approx(1.5)
    assert "2.5 s from now" in error.message


# -- salts -----------------------------------------------------------------------------------------

ALICE, BOB = (Tenant(name, own_cache=True) for name in ("alice", "bob"))


def test_client_has_the_salt_it_asks_for_without_isolation():
    assert cache_salt(Tenant(), None) is None
    assert cache_salt(Tenant(), "") is None
    assert cache_salt(Tenant("alice"), "mine") == "mine"


def test_salt_is_unique_to_tenant_and_own_salt():
    tenants = [ALICE, BOB, Tenant("alicex", own_cache=True), Tenant("a", own_cache=True)]
    own = [None, "x", "licex", "alice", "bob", "\x00", "ß", "\ud800"]
    salts = {(t.name, o): cache_salt(t, o) for t, o in itertools.product(tenants, own)}
    assert len(set(salts.values())) == len(salts)
    assert cache_salt(ALICE, "") == cache_salt(ALICE, None)
    stolen = cache_salt(ALICE, None)
    assert cache_salt(BOB, stolen) not in (stolen, cache_salt(ALICE, stolen))


def test_salt_is_the_same_at_every_start():
    assert cache_salt(ALICE, "x") == "342cb34df72dcc2e5545f14032f21394"
    assert cache_salt(ALICE, "x") == cache_salt(Tenant("alice", 7.0, own_cache=True), "x")


@pytest.mark.parametrize("own", [None, "session"])
def test_router_finds_no_prefix_of_another_tenant(own):
    hasher = PrefixHasher(16, secret=7)
    alice, bob = (
        hasher.prefix_hashes(list(range(64)), salt_of(cache_salt(tenant, own)))
        for tenant in (ALICE, BOB)
    )
    assert len(alice) == 4 and not set(alice.tolist()) & set(bob.tolist())


# -- context and KV cache --------------------------------------------------------------------------


def worker(name, blocks, context=4096):
    return announcement(name, device_blocks=blocks, max_context_tokens=context)


SMALL, LARGE = worker("small", 11), worker("large", 21)  # 160 and 320 tokens can be held


@pytest.mark.parametrize(
    ("prompt", "wanted", "unfit"),
    [
        (100, 60, set()),
        (100, 61, {"small"}),
        (159, 0, set()),
        (160, 0, {"small"}),
        (160, -1, {"small"}),
        (1, 319, {"small"}),
    ],
)
def test_workers_that_cannot_hold_prompt_and_answer_are_named(prompt, wanted, unfit):
    assert unfit_workers([SMALL, LARGE], prompt, wanted) == unfit
    assert unfit_workers([], 10**6, 1) == frozenset(), "nothing is known"


@pytest.mark.parametrize(
    ("prompt", "wanted", "param", "blocks"), [(10, 311, "max_tokens", 21), (900, 0, "messages", 57)]
)
def test_request_too_large_for_all_is_refused_with_both_sizes(prompt, wanted, param, blocks):
    error = refused(unfit_workers, [SMALL, LARGE], prompt, wanted)
    assert (error.status, error.code, error.param) == (400, "footprint_too_large", param)
    assert f"takes {blocks} blocks" in error.message and "has 20" in error.message


@pytest.mark.parametrize(
    ("wanted", "needs"),
    [(10, "210 (200 in the prompt and 10 to generate)"), (0, "201 (200 in the prompt)")],
)
def test_context_that_is_too_short_is_named_as_such(wanted, needs):
    workers = [worker("a", 500, context=200), worker("b", 2, context=100)]
    error = refused(unfit_workers, workers, 200, wanted)
    assert error.code == "context_length_exceeded"
    assert f"context is 200 tokens, the request needs {needs}" in error.message


def test_room_in_one_worker_and_context_in_another_do_not_add():
    workers = [worker("deep", 11, context=4096), worker("short", 500, context=100)]
    error = refused(unfit_workers, workers, 200, 1)
    assert error.code in ("footprint_too_large", "context_length_exceeded")


# -- approximate answers ---------------------------------------------------------------------------


def approx_worker(name, policy=None, loss=None):
    plan = {"planner": "auto", "rates": {}, **({"approx": policy} if policy else {})}
    plan |= {"loss": loss} if loss else {}
    node = replace(node_profile("pcie"), name=name)
    return announcement(name, node, engine="torch", load_plan=plan)


@pytest.mark.parametrize(
    ("header", "field", "most_loss"),
    [
        ("ok", None, math.inf), (" OK ", None, math.inf), (None, "ok", math.inf), ("no", "ok", 0.0),
        (None, None, None), ("", "ok", None), (None, "", None), ("0.05", "ok", 0.05),
        (None, ".5", 0.5), ("1", None, 1.0),
    ],
)  # fmt: skip
def test_approx_header_wins_over_the_field(header, field, most_loss):
    assert approx_allowed(header, field) == most_loss


@pytest.mark.parametrize(
    "given", ["yes", "true", True, "k=5", ["ok"], "0", "0.0", "1.5", "-0.1", "nan", "inf", "1e-3"]
)
def test_approx_of_another_word_is_refused(given):
    error = refused(approx_allowed, None, given)
    assert (error.status, error.param) == (400, "x-kappa-approx") and "give 'ok'" in error.message


def test_approximate_answers_need_a_policy_and_consent():
    policies = (None, "never", "ask", "always")
    assert {
        (policy, most_loss)
        for policy, most_loss in itertools.product(policies, (math.inf, 0.05, None, 0.0))
        if is_approximate(approx_worker("w", policy), most_loss)
    } == {("ask", math.inf), ("always", math.inf), ("always", None)}


def test_loss_bound_goes_to_workers_that_keep_it_or_is_refused():
    workers = [
        approx_worker("unknown", "ask"), approx_worker("six", "ask", 0.06),
        approx_worker("two", "always", 0.02), approx_worker("exact", None, 0.01),
    ]  # fmt: skip
    assert exact_workers(workers, 0.06) == {"unknown", "exact"}
    assert exact_workers(workers, 0.05) == {"unknown", "six", "exact"}
    assert exact_workers(workers, math.inf) == {"exact"}
    error = refused(exact_workers, workers, 0.01)
    assert (error.status, error.code) == (400, "approx_not_allowed")
    assert "of so little stated loss" in error.message
    # Who takes no loss at all is answered exactly everywhere.
    assert exact_workers(workers, 0.0) == frozenset()
    assert not any(is_approximate(worker, 0.0) for worker in workers)


def test_asking_for_approx_excludes_exact_workers():
    mixed = [approx_worker("a"), approx_worker("b", "ask"), approx_worker("c", "always")]
    assert exact_workers(mixed, math.inf) == {"a"}
    assert exact_workers(mixed, None) == exact_workers(mixed, 0.0) == frozenset()
    error = refused(exact_workers, mixed[:1], math.inf)
    assert (error.status, error.code) == (400, "approx_not_allowed")
    assert "no worker here gives approximate" in error.message
    # Of workers that are not there yet nothing is known: that is another error.
    assert exact_workers([], math.inf) == frozenset()

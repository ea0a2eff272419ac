"""What the tests of the router's core are built from: workers, prompts, blocks, routers."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from kappa.cost import StepModel, step_model
from kappa.hardware import node_profile
from kappa.keys import digest_of
from kappa.protocol import Announcement
from kappa.shapes import model_shape
from kappa_router.api.errors import ApiError
from kappa_router.api.tenants import Tenants
from kappa_router.calibration import Calibration
from kappa_router.config import RouterConfig
from kappa_router.decision import Held, PricedPrompt, RouteRequest
from kappa_router.fleet import Fleet
from kappa_router.index.kv_event_types import BlocksStored
from kappa_router.index.lookup import Match
from kappa_router.policy import policy_named
from kappa_router.router import Router

SIZE = 16
SHAPE = model_shape("llama-3.1-8b")
KV_BYTES = 131072.0
NEVER = float("inf")

# So many draws of one of two miss the other once in 8 million times.
DRAWN = 24


def announcement(worker, node="h100-pcie5", **changes):
    """A worker of Llama-3.1-8B on a node, by its profile or its name in the catalogue, which then
    takes nothing for a load but its bytes."""
    profile = replace(node_profile(node), load_fixed_s=0.0) if isinstance(node, str) else node
    announced = Announcement(
        worker=worker, model="m", node=profile, step=step_model(SHAPE, profile),
        kv_bytes_per_token=KV_BYTES, emulated_model="", fingerprint="f", block_tokens=SIZE,
        device_blocks=20_001, host_blocks=1000, max_batch_tokens=8192, max_context_tokens=200_000,
        events_endpoint="", snapshot_endpoint="",
    )  # fmt: skip
    return replace(announced, **changes)


def small(worker, node="pcie", **changes):
    """A worker with a small cache that computes quickly, as tests over sockets announce it."""
    plain = {
        "step": StepModel(1e-5, 0.0, 1e-3, 0.0), "kv_bytes_per_token": 1e5, "device_blocks": 100,
        "host_blocks": 0, "max_batch_tokens": 512, "max_context_tokens": 1024,
    }  # fmt: skip
    return announcement(worker, node, **plain | changes)


def router(*workers, policy="ttft", **options):
    """A router with these workers (names or announcements) from time 0 on."""
    made = Router(RouterConfig(policy=policy_named(policy), secret=7, **options))
    for worker in workers or ("a", "b"):
        made.join(announcement(worker) if isinstance(worker, str) else worker, 0.0)
    return made


def prompt(tokens, seed=0):
    return np.random.default_rng(seed).integers(0, 1000, tokens)


def hasher_of(made):
    """The prompt hasher of a router's first model."""
    return next(iter(made.models.values())).hasher


def ask(name="r", tokens=100, seed=0, **options):
    """A request with a random prompt; None: one that could not be tokenized."""
    token_ids = None if tokens is None else prompt(tokens, seed)
    return RouteRequest(name, token_ids, max_tokens=50, **options)


def ask_counting(request_id="r", tokens=100, tenant=""):
    """A request whose prompt counts up."""
    return RouteRequest(request_id, np.arange(tokens), max_tokens=4, tenant=tenant)


def outcome(made, ttft_s, at_s, tokens=100, name="outcome"):
    """A request that meets no other, sent at `at_s`, has its first token `ttft_s` later."""
    made.route(ask(name, tokens=tokens), at_s)
    made.first_token(name, at_s + ttft_s)
    made.release(name, at_s + ttft_s, complete=False)


def stored(worker, token_ids, tier="device"):
    """The event that a worker holds the whole blocks of a prompt."""
    blocks = len(token_ids) // SIZE
    names = tuple(
        f"{worker}{token_ids[: (i + 1) * SIZE].tobytes()!r}".encode() for i in range(blocks)
    )
    return BlocksStored(worker, tier, names, None, token_ids[: blocks * SIZE], SIZE, 0)


def match_all(index, prefix_hashes, most=None):
    """Of each worker that holds any of a prompt: leading blocks on the device, then behind it."""
    device, host, disk = index.match_columns(prefix_hashes, most).tolist()
    columns = {worker: index.column(worker) for worker in index.workers()}
    found = {worker: Match(device[c], host[c], disk[c]) for worker, c in columns.items()}
    return {worker: match for worker, match in found.items() if any(match)}


def match_worker(index, prefix_hashes, worker, most=None):
    return match_all(index, prefix_hashes, most).get(worker, Match(0, 0))


def join(fleet, announced, now_s=0.0):
    fleet.join(announced, now_s)
    fleet.calibrate(announced.worker, Calibration(announced).speed, 0.0)


def fleet_of(*nodes):
    """A fleet of workers w0, w1, ... on nodes of the catalogue."""
    made = Fleet()
    for i, node in enumerate(nodes or ("h100-pcie5", "gh200-c2c")):
        join(made, announcement(f"w{i}", node))
    return made


def estimate(fleet, now_s=0.0, tokens=4000, cached=0, device=0, disk=0):
    """What a request costs on all workers of a fleet."""
    slots = fleet.ready(now_s, NEVER, frozenset())
    held = Held(*(np.full(len(slots), float(tokens)) for tokens in (device, cached, disk)))
    return fleet.estimate(slots, now_s, PricedPrompt(tokens, 100), held)


def refused(call, *arguments, **options):
    """The error with which an API refuses a call."""
    with pytest.raises(ApiError) as caught:
        call(*arguments, **options)
    return caught.value


class Followed:
    """In place of a subscriber: the stream of a worker that is there and tells nothing."""

    synced = connected = alive = True

    def __init__(self):
        self.events = Counter()

    async def close(self):
        pass


def sample(live, text):
    """The value of the first line of the metrics that begins with the text; None without one."""
    lines = live.metrics.exposition().decode().splitlines()
    return next((float(line.split()[-1]) for line in lines if line.startswith(text)), None)


def tenants_of(by_key, weights=None, **options):
    """A table of tenants from keys in the clear."""
    by_digest = {digest_of(key): name for key, name in by_key.items()}
    return Tenants(weights=weights or {}, **options).with_digests(by_digest)

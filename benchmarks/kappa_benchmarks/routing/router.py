"""`kappa bench router`: how long one decision takes, part by part.

The router is the one that serves, in this process, in a state such as a busy cluster has: an index
fed by KV events up to its bound, several requests in flight on every node, prompts of which a part
is held here and there. Tokenization is excluded.
"""

from __future__ import annotations

import math
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console

from kappa.cost import step_model
from kappa.hardware import node_profile
from kappa.protocol import Announcement
from kappa.shapes import model_shape
from kappa.slo import ServiceObjective
from kappa_benchmarks.harness import Json, note, publish, quantile, result, rows_table, usage_errors
from kappa_router.config import RouterConfig
from kappa_router.decision import RouteRequest
from kappa_router.index.kv_event_types import BlocksStored, Tier
from kappa_router.policy import policy_named
from kappa_router.router import Router

LENGTHS = (512, 4096, 32_768, 131_072)
NODES = (8, 64, 1000)
_BLOCK_TOKENS = 16
# Admission evaluates each request and refuses none.
_ANY = ServiceObjective(ttft_s=1e6, tpot_s=1e6)
# Blocks in the index, counted once for each worker that has them.
_INDEX_BLOCKS = {8: 200_000, 64: 200_000, 1000: 1_000_000}
# Different prompts per length, and the share of each that some node holds.
_PROMPTS = {512: 64, 4096: 32, 32_768: 16, 131_072: 4}
_HELD = 0.8
_SYSTEM_PROMPT_TOKENS = 512
_FILLER_BLOCKS = 256
_IN_FLIGHT_PER_NODE = 4
_VOCABULARY = 128_000
_PROFILES = ("gh200-c2c", "h100-pcie5", "a100-pcie4")

Tokens = NDArray[np.int32]
Row = dict[str, Any]


def router(
    repeats: Annotated[int, typer.Option(min=20, help="Decisions measured per row.")] = 400,
    policy: Annotated[str, typer.Option(help="Policy that decides.")] = "priced",
    seed: Annotated[int, typer.Option(help="Seed of prompts and state.")] = 1,
    json_output: Json = False,
) -> None:
    """One routing decision in microseconds: hash, look up, score, and the whole decision."""
    with usage_errors():
        policy_named(policy)
    rows: list[Row] = []
    bytes_per_block = 0.0
    for nodes in NODES:
        note(f"decisions among {nodes} nodes")
        state = BusyRouter(nodes, policy, seed)
        rows += state.rows(repeats)
        bytes_per_block = max(bytes_per_block, state.index_bytes / state.blocks())
    facts = result(
        rows=rows, index_bytes_per_block=bytes_per_block,
        index_blocks={str(nodes): blocks for nodes, blocks in _INDEX_BLOCKS.items()},
        policy=policy, repeats=repeats,
    )  # fmt: skip
    publish(facts, lambda console: show(facts, console), json_output=json_output)


class BusyRouter:
    """A router in the state of a busy cluster, and prompts to route.

    Args:
        nodes: how many workers it has.
        policy: name of its policy.
        seed: of tokens, places and requests in flight.
    """

    def __init__(self, nodes: int, policy: str, seed: int) -> None:
        self.nodes = nodes
        self._rng = np.random.default_rng(seed)
        self._names = self._ticks = 0
        tracemalloc.start()
        self._router = Router(
            RouterConfig(
                policy=policy_named(policy, seed=seed), secret=1,
                index_blocks=_INDEX_BLOCKS[nodes], stale_after_s=math.inf, forecast_workers=0,
                admission=True, objective=_ANY,
            )
        )  # fmt: skip
        for number in range(nodes):
            self._router.join(_announcement(number), 0.0)
        (model,) = self._router.models.values()
        self.index, self._hasher = model.index, model.hasher
        self._system = self._tokens(_SYSTEM_PROMPT_TOKENS)
        self.prompts = {
            length: [
                np.concatenate([self._system, self._tokens(length)])[:length] for _ in range(count)
            ]
            for length, count in _PROMPTS.items()
        }
        self._fill()
        of_index = tracemalloc.Filter(True, "*/kappa_router/index/*")
        traces = tracemalloc.take_snapshot().filter_traces([of_index]).traces
        self.index_bytes = sum(trace.size for trace in traces)
        tracemalloc.stop()
        self._occupy()

    def rows(self, repeats: int) -> Iterator[Row]:
        """A result row per length and form of input."""
        hasher = self._hasher
        for length in LENGTHS:
            hashes = [hasher.prefix_hashes(prompt) for prompt in self.prompts[length]]
            for form in ("array", "list"):
                prompts: Sequence[Any] = self.prompts[length]
                if form == "list":
                    prompts = [prompt.tolist() for prompt in prompts]
                total = self._decisions([{"token_ids": ids} for ids in prompts], repeats)
                scored = self._decisions(
                    [{"prefix_hashes": each, "prompt_tokens": length} for each in hashes], repeats
                )
                hash_us = _median_us(hasher.prefix_hashes, prompts, repeats)
                lookup_us = _median_us(self.index.match_columns, hashes, repeats)
                yield {
                    "tokens": length, "nodes": self.nodes, "input": form, "hash_us": hash_us,
                    "lookup_us": lookup_us,
                    "score_us": max(statistics.median(scored) - lookup_us, 0.0),
                    "total_us": {"p50": statistics.median(total), "p99": quantile(total, 0.99)},
                }  # fmt: skip

    def blocks(self) -> int:
        """Blocks in the index; one that several workers hold counts for each, as its names do."""
        now = self.index.stats()
        return max(now["names"], now["blocks"])

    def _tokens(self, count: int) -> Tokens:
        return self._rng.integers(0, _VOCABULARY, count, dtype=np.int32)

    def _fill(self) -> None:
        """The prompts' beginnings on two nodes each, and other sessions up to the bound."""
        ends = [self._store(node, self._system, "device") for node in range(self.nodes)]
        for prompts in self.prompts.values():
            for prompt in prompts:
                own = prompt[len(self._system) : int(_HELD * len(prompt))]
                one, other = self._rng.choice(self.nodes, size=2, replace=False).tolist()
                self._store(one, own[: len(own) // 2], "device", ends[one])
                self._store(other, own, "host", ends[other])
        while self.blocks() < _INDEX_BLOCKS[self.nodes] - _FILLER_BLOCKS:
            tokens = self._tokens(_FILLER_BLOCKS * _BLOCK_TOKENS)
            self._store(int(self._rng.integers(self.nodes)), tokens, "device")

    def _store(self, node: int, tokens: Tokens, tier: Tier, parent: int | None = None) -> int:
        """Blocks come to a node, below `parent`; returns the name of the last one."""
        blocks = len(tokens) // _BLOCK_TOKENS
        event = BlocksStored(
            worker=f"worker-{node}", tier=tier,
            engine_hashes=tuple(range(self._names, self._names + blocks)),
            parent_engine_hash=parent, token_ids=tokens[: blocks * _BLOCK_TOKENS],
            block_tokens=_BLOCK_TOKENS, salt=0 if parent is None else None,
        )  # fmt: skip
        self._names += blocks
        self._router.blocks([event])
        return self._names - 1

    def _occupy(self) -> None:
        """Requests in flight, half of them past their first token."""
        for number in range(_IN_FLIGHT_PER_NODE * self.nodes):
            name = f"busy-{number}"
            hashes = self._rng.integers(1, 2**63, 128).astype(np.uint64)
            request = RouteRequest(
                name, prefix_hashes=hashes, prompt_tokens=2048, max_tokens=256, session=name
            )
            self._router.route(request, self._now_s())
            if number % 2:
                self._router.first_token(name, self._now_s())

    def _now_s(self) -> float:
        self._ticks += 1
        return 1e-3 * self._ticks

    def _decisions(self, requests: list[dict[str, Any]], repeats: int) -> list[float]:
        """Microseconds of one decision each: hash, look up, score, choose and reserve."""
        taken = []
        for number in range(-len(requests), repeats):
            now_s, name = self._now_s(), f"measured-{number}"
            request = RouteRequest(name, max_tokens=256, **requests[number % len(requests)])
            begin = time.perf_counter()
            self._router.route(request, now_s)
            end = time.perf_counter()
            self._router.release(name, now_s, complete=False)
            # The first of each prompt only warms up.
            if number >= 0:
                taken.append(1e6 * (end - begin))
        return taken


def _median_us(call: Callable[[Any], object], inputs: Sequence[Any], repeats: int) -> float:
    taken = []
    for number in range(repeats):
        begin = time.perf_counter()
        call(inputs[number % len(inputs)])
        taken.append(1e6 * (time.perf_counter() - begin))
    return statistics.median(taken)


def _announcement(number: int) -> Announcement:
    shape = model_shape("llama-3.1-8b")
    profile = node_profile(_PROFILES[number % len(_PROFILES)])
    return Announcement(
        worker=f"worker-{number}", model="llama-3.1-8b", node=profile,
        step=step_model(shape, profile), kv_bytes_per_token=131_072.0, emulated_model="",
        fingerprint="bench", block_tokens=_BLOCK_TOKENS, device_blocks=30_000, host_blocks=100_000,
        max_batch_tokens=8192, max_context_tokens=262_144, events_endpoint="",
        snapshot_endpoint="",
    )  # fmt: skip


def show(facts: Row, console: Console) -> None:
    """The parts of a decision, and the index's memory."""
    ours = {
        "tokens": "tokens:,", "nodes": "nodes:,", "input": "input", "hash": "hash_us:.0f",
        "look-up": "lookup_us:.0f", "score": "score_us:.0f", "total p50": "total_us.p50:.0f",
        "p99": "total_us.p99:.0f",
    }  # fmt: skip
    title = f"One decision, policy {facts['policy']}; µs"
    console.print(rows_table(title, ours, facts["rows"], ("input",)))
    console.print(
        f"index: {facts['index_bytes_per_block']:.1f} bytes a block at most", highlight=False
    )

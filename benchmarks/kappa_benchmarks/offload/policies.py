"""Ways in which the served engine keeps the contexts of requests that decode, by name.

"host-kv" loads KV at every step (the baseline), "host-weights" where weights cross, too;
"host-cpu" leaves attention, its projections and a share of FC1 to the CPU then (paper 002).
"host-kvpr" keeps activations beside it and splits as served, "kvpr-paper" by paper 000's Eq. 12,
"share-N" at N %. "hybrid-N" keeps N % of the blocks as activations instead (paper 003),
"host-hybrid" as planned, "hybrid-paper" by Algorithm 1 as printed; "hybrid-device" has a quarter as
many bytes on the device, for activations that stay. "cpu-*": the CPU attends to part of a context
where it lies (paper 002): "cpu-N" to a share, "cpu-paper" by bandwidth, "cpu-ahead" by the
predicted step. "device": nothing leaves the device, a bound. All run the engine's own loop.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache

from kappa.plans.cpu_offload import busy_s, divide, layer_times
from kappa.plans.decoding import (
    activation_share,
    attention_refused,
    cpu_share,
    split_ahead,
    split_context,
    split_s,
)
from kappa.plans.hybridserve import allocate_corrected, allocate_paper, planned_share
from kappa.plans.planners import Planning, host_planners
from kappa.plans.rates import LEAST_GAIN, PlanRates
from kappa_benchmarks.offload.cells import DecodeCell
from kappa_benchmarks.offload.rig import LINK, Arm, Rig, Sample
from kappa_engine.forward import Forward
from kappa_engine.kv_cache import Arena, ArenaSize
from kappa_engine.llm_engine import Engine
from kappa_engine.sequence import EngineRequest, Sequence
from kappa_engine.settings import EngineOptions

_COPY_STEPS = 3
# Device blocks of a request beside its chunk: the one that fills, and those that leave.
_SPARE_BLOCKS = 4

Share = Callable[[int], float]
"""A share of a context, by its length in tokens."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to keep contexts."""

    # As of `EngineOptions`.
    planner: str
    act_share: float = 0.0
    keep_kv: bool = True
    act_device_blocks: int = 0
    # That comes from activations where KV is there, too; None: as served.
    split: Share | None = None
    # That the CPU attends to; None: no threads for it.
    cpu: Share | None = None
    # Of a step, where it is not that of the shares.
    step_s: float = 0.0
    note: str = ""


class Fixed(Planning):
    """The engine's planners, with the shares of one way."""

    def __init__(self, way: Way, rates: PlanRates, block_tokens: int) -> None:
        host = host_planners(way.planner, way.act_share)
        super().__init__(block_tokens, rates, cpu=way.cpu is not None, host=host)
        self._way = way

    def split_share(self, batch: int, context_tokens: int) -> float:
        """The way's share."""
        if self._way.split is None or context_tokens < 1:
            return super().split_share(batch, context_tokens)
        return self._way.split(context_tokens)

    def on_cpu(self, kept_tokens: int) -> int:
        """The way's share, in whole blocks."""
        if self._way.cpu is None:
            return super().on_cpu(kept_tokens)
        blocks = self._way.cpu(kept_tokens) * kept_tokens / self._block_tokens
        return round(blocks) * self._block_tokens


class Policies:
    """The ways of one cell on one machine, and what each should take."""

    def __init__(self, cell: DecodeCell, rates: PlanRates, block_tokens: int) -> None:
        self.cell, self.rates, self._bt = cell, rates, block_tokens

    def way(self, name: str) -> Way:
        """The way of that name; `ValueError`: there is none."""
        cell, rates, bt = self.cell, self.rates, self._bt
        kind, _, rest = name.partition("-")
        share = int(rest) / 100 if rest.isdigit() else -1.0
        if name == "device":
            return Way("auto")
        if name in ("host-kv", "host-weights"):
            return Way(name)
        if name == "host-cpu":
            times = layer_times(rates, cell.requests, self.full(cell.prompt))
            found = divide(times)
            step_s = rates.layers * max(busy_s(times, found))
            note = f"{', '.join(found.products) or 'attention alone'}, {found.fc1_share:.0%} of FC1"
            return Way(name, cpu=lambda full: 1.0, step_s=step_s, note=note)
        if name in ("host-hybrid", "hybrid-paper", "hybrid-device"):
            kv_bytes = self.host_blocks() * bt * rates.kv_bytes
            allocate = allocate_paper if name == "hybrid-paper" else allocate_corrected
            stay = int(self.host_blocks() / (4 * rates.activation_ratio))
            stay = stay if name == "hybrid-device" else 0
            batch = cell.held or cell.requests
            planned = planned_share(rates, bt, kv_bytes, batch, allocate, stay)
            note = f"{planned:.0%} activations" + f", {stay} blocks on the device" * bool(stay)
            return Way("host-hybrid", planned, keep_kv=False, act_device_blocks=stay, note=note)
        if kind == "hybrid" and share >= 0:
            return Way("host-hybrid", share, keep_kv=False)
        splits: dict[str, Share] = {
            "host-kvpr": lambda full: split_ahead(rates, cell.requests, full).share,
            "kvpr-paper": lambda full: activation_share(rates),
            **({name: lambda full: share} if kind == "share" and share >= 0 else {}),
        }
        if name in splits:
            split = cache(splits[name])
            note = f"{split(self.full(cell.prompt)):.0%} from activations at first"
            return Way("host-kvpr", 1.0, split=split, note=note)
        attended: dict[str, Share] = {
            "cpu-paper": lambda full: cpu_share(rates),
            "cpu-ahead": lambda full: split_context(rates, cell.requests, full, bt).share,
            **({name: lambda full: share} if kind == "cpu" and share >= 0 else {}),
        }
        if name in attended:
            return Way("cpu", cpu=cache(attended[name]))
        raise ValueError(f"no policy named {name!r}")

    def key(self, way: Way) -> tuple[object, ...]:
        """Equal for ways that store and load the same at every step."""
        lengths = range(self.full(self.cell.prompt), self.cell.prompt + self.cell.gen, self._bt)
        stored = way.planner == "auto", way.act_share, way.keep_kv, way.cpu is None
        return (
            *stored,
            way.act_device_blocks,
            *(self.activations(way, length) for length in lengths),
            *(way.cpu(length) for length in lengths if way.cpu is not None),
        )

    def predicted_s(self, way: Way) -> float:
        """Seconds of all decoding steps, by the rates."""
        lengths = range(self.cell.prompt, self.cell.prompt + self.cell.gen - 1)
        return sum(self.step_s(way, length) for length in lengths)

    def step_s(self, way: Way, length: int) -> float:
        """Seconds of a step behind `length` tokens of every request. Of its shorter resource one
        layer's share is not hidden."""
        rates, batch, full = self.rates, self.batch(way), self.full(length)
        if way.step_s:
            return way.step_s
        if way.cpu is not None:
            left = round(way.cpu(full) * full / self._bt) * self._bt
            step_s = split_s(rates, batch, full, left)
            link_s = rates.weights_s + rates.load.seconds(batch * (full - left))
            return step_s + rates.serial_share * min(link_s, step_s)
        acts = self.activations(way, length)
        gpu_s = rates.decode_s(batch, length, acts)[1]
        moved = batch * (full - acts + rates.activation_ratio * acts)
        moved -= rates.activation_ratio * min(way.act_device_blocks * self._bt, batch * acts)
        link_s = 0.0 if way.planner == "auto" else rates.load.seconds(moved)
        link_s += rates.weights_s
        return max(link_s, gpu_s) + rates.serial_share * min(link_s, gpu_s)

    def activations(self, way: Way, length: int) -> int:
        """Tokens of each request that come from activations, in whole blocks."""
        full = self.full(length)
        share = way.act_share if way.split is None else way.split(full)
        return round(share * full / self._bt) * self._bt

    def lacks(self, name: str) -> str:
        """Why a way cannot be tried: what was not measured of the CPU; empty if it can."""
        if name == "host-cpu" and self.rates.multiply is None:
            return "products of the CPU are not measured"
        on_cpu = name == "host-cpu" or name.startswith("cpu-")
        return attention_refused(self.rates) if on_cpu and self.rates.attend is None else ""

    def choice(self) -> str:
        """The planner's choice: the baseline, unless the other is worth it."""
        if "host-hybrid" in self.cell.policies:
            return max(self.cell.policies, key=lambda name: name == "host-hybrid")
        own = next(
            (n for n in ("host-kvpr", "cpu-ahead", "host-cpu") if n in self.cell.policies), ""
        )
        if not own or self.lacks(own) or (own == "cpu-ahead" and attention_refused(self.rates)):
            return self.cell.policies[0]
        plain_s = self.predicted_s(self.way(self.cell.policies[0]))
        gain = 1.0 - self.predicted_s(self.way(own)) / plain_s
        return own if gain >= LEAST_GAIN else self.cell.policies[0]

    def full(self, length: int) -> int:
        """Tokens of a request that are in full blocks: those that are in host memory."""
        return length // self._bt * self._bt

    def host_blocks(self) -> int:
        """Blocks of KV that host memory has room for."""
        return (self.cell.held or self.cell.requests) * self._whole

    @property
    def _whole(self) -> int:
        """Blocks of a whole context."""
        return -(-(self.cell.prompt + self.cell.gen) // self._bt)

    def batch(self, way: Way) -> int:
        """Requests of a cell: its own, or as many as host memory holds in this way."""
        if self.cell.requests:
            return self.cell.requests
        act = int(self._whole * way.act_share + 0.5)
        ratio = self.rates.activation_ratio
        size = self._whole - act + act * ratio
        return int((self.host_blocks() + ratio * way.act_device_blocks) / size)

    def options(self, way: Way) -> EngineOptions:
        """Together in one iteration, or, where memory is short, two prompts at a time."""
        cell, batch = self.cell, self.batch(way)
        together = batch if cell.decodes_alone else 2
        return EngineOptions(
            budget_tokens=together * cell.prompt + batch, max_running=batch,
            scheduler="fcfs", planner=way.planner, act_share=way.act_share, keep_kv=way.keep_kv,
            act_device_blocks=way.act_device_blocks,
        )  # fmt: skip

    def size(self, way: Way, ratio: float) -> ArenaSize:
        """The arena's size; ratio: a block's activations over its KV, in bytes."""
        cell, options = self.cell, self.options(way)
        # KVPR's activations take room beside the KV; where memory is short, from the KV's.
        stored = self.host_blocks()
        kv_share = 1.0 if way.keep_kv else 1.0 - way.act_share
        if not cell.decodes_alone:
            stored = int(stored / (kv_share + way.act_share * ratio))
        batch = self.batch(way)
        whole = batch * self._whole
        window = options.window_blocks(self._bt) + _SPARE_BLOCKS * batch
        stays = way.planner in ("auto", "cpu") or cell.decodes_alone
        device = max(window, whole) if stays else window
        kv_host, act_host = (round(stored * share) for share in (kv_share, way.act_share))
        if not cell.requests:
            act_host = batch * int(self._whole * way.act_share + 0.5)
            kv_host = whole - act_host
        act_host = max(act_host - way.act_device_blocks, 0)
        act_device = options.capture_blocks(self._bt) + way.act_device_blocks
        return ArenaSize(device, kv_host, act_device, act_host, block_tokens=self._bt)


# Arms ---------------------------------------------------------------------------------------------


def decode_arms(rig: Rig, cell: DecodeCell) -> tuple[list[Arm], dict[str, str]]:
    """An arm per policy and the link alone with the same bytes; and those left out, with why. All
    policies are exact."""
    left_out: dict[str, str] = {}
    policies = Policies(cell, rig.rates, rig.block_tokens)
    choice = policies.choice()
    arms = []
    for name in cell.policies:
        if why := policies.lacks(name):
            left_out[name] = why
            continue
        way = policies.way(name)
        predicted_s = policies.predicted_s(way) if cell.decodes_alone else None
        run = _decoding(rig, policies, way)
        arms.append(Arm(name, run, predicted_s, way.note, name == choice, policies.key(way)))
    arms.append(_link_arm(rig, cell))
    return arms, left_out


def _decoding(rig: Rig, policies: Policies, way: Way) -> Callable[[], Sample]:
    """Where host memory has room for all contexts, decoding alone is timed; else prompts, too."""
    cell, config, batch = policies.cell, rig.config, policies.batch(way)
    ratio = config.hidden / (2 * config.kv_width)

    def run() -> Sample:
        with ExitStack() as closing:
            weights = rig.forward.weights
            arena = Arena(
                config.shape, policies.size(way, ratio), dtype=weights.dtype, device=weights.device
            )
            closing.callback(arena.close)
            threads = 0 if way.cpu is None else 1
            forward = Forward(weights, arena, rig.mover, cpu_threads=threads)
            closing.callback(forward.close)
            planning = Fixed(way, rig.rates, rig.block_tokens)
            engine = Engine(forward, policies.options(way), planning)
            if way.cpu is not None and way.planner == "cpu":
                # The CPU attends to KV in host memory: the prefix must be there and nowhere else.
                _until_over(engine, _submitted(rig, engine, batch, cell.prompt, 1))
                engine.store.drain(60.0)
                device = engine.memory.device
                device.release(device.take(device.pool.count))
            handles, held = _submitted(rig, engine, batch, cell.prompt, cell.gen), 0
            before_s = 0.0
            if cell.decodes_alone:
                before_s = rig.timed(lambda: _until_first(engine, handles)).latency_s

            def rest() -> None:
                nonlocal held
                held = _until_over(engine, handles)

            sample = rig.timed(rest)
            engine.store.drain(60.0)
        tokens = tuple(t for handle in handles for t in handle.tokens[handle.prompt_tokens :])
        return replace(sample, before_s=before_s, tokens=tokens, held=held)

    return run


def _submitted(rig: Rig, engine: Engine, batch: int, prompt: int, gen: int) -> list[Sequence]:
    prompts = rig.prompts(batch, prompt)
    return [engine.submit(EngineRequest(tokens.tolist(), gen)) for tokens in prompts]


def _until_first(engine: Engine, handles: list[Sequence]) -> None:
    while not all(handle.output_tokens for handle in handles):
        engine.step()
    engine.store.drain(60.0)


def _until_over(engine: Engine, handles: list[Sequence]) -> int:
    """Step until all are over; how many ran at once, at most."""
    held = 0
    while engine.busy:
        engine.step()
        held = max(held, len(engine.batcher.running))
    assert all(handle.finish_reason == "length" for handle in handles)
    return held


def _link_arm(rig: Rig, cell: DecodeCell) -> Arm:
    """Copies of the first step's KV, layer by layer, with nothing else to do."""
    batch = cell.requests or cell.held
    blocks = min(batch * (cell.prompt // rig.block_tokens), rig.arena.size.kv_host)
    host = rig.arena.kv_host
    landing = rig.arena.kv_device.new_empty((2, blocks, *host.shape[2:]))

    def copy() -> None:
        for index in range(_COPY_STEPS * rig.config.layers):
            source = host[index % rig.config.layers, :blocks]
            # Newer copies come behind older ones.
            rig.mover.h2d([(landing[index % 2], source)])

    predicted_s = _COPY_STEPS * rig.rates.load.seconds(blocks * rig.block_tokens)
    return Arm(LINK, lambda: rig.timed(copy), predicted_s)

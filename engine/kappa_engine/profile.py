"""Measurements of our engine on a machine, as JSON.

`profile` measures the rates that load plans are made from, with the engine's own weights, arena,
mover and forward pass: seconds to load n tokens' KV of a layer and to project n tokens'
activations, each copy or product behind the one before as in a pass; grids of prefill steps,
t_gpu(T, S), and of decoding steps over sequences and the context tokens of all of them; the link's
bandwidth alone, and while the CPU attends; attention on the CPU, through the path that serves.
Where weights lie in host memory, all of this is measured while none cross, and the seconds of one
crossing beside it. `rates_from_measured` of `kappa.plans.measured` fits, or refuses, its result. It
runs before the engine serves, needs the arena to itself, and writes over its blocks.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kappa.model import kv_bytes_per_token
from kappa.plans.rates import FORMAT
from kappa_engine import layers
from kappa_engine.cpu_attention import result
from kappa_engine.forward import Forward
from kappa_engine.peaks import Action, device_name, elapsed_s, repeating
from kappa_engine.step import HostContext, OnCpu, Pages, Source, TokenSpan, joined, prompt_row
from kappa_engine.weights import GROUPS

_SHAPE = ("layers", "hidden", "heads", "kv_heads", "head_dim", "inner", "vocab")


@dataclass(frozen=True, slots=True)
class ProfileSettings:
    """The sizes of a profile; those that the arena cannot hold are left out."""

    # Of the two lines, in tokens of one sequence; at least three must fit.
    tokens: tuple[int, ...] = (128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096)
    # Axes of the grid of prefill steps.
    new_tokens: tuple[int, ...] = (1, 16, 64, 128, 256, 512, 1024, 2048)
    context_tokens: tuple[int, ...] = (0, 512, 2048, 8192)
    # Axes of the grid of decoding steps: sequences, and context tokens of all of them.
    decode_sequences: tuple[int, ...] = (1, 4, 16, 64)
    decode_tokens: tuple[int, ...] = (0, 1024, 4096, 16384)
    # Of each figure; the least counts, since other work on the machine only adds to it.
    repeats: int = 9


def cached_profile(
    forward: Forward, folder: str | Path, settings: ProfileSettings | None = None
) -> dict[str, Any]:
    """The stored profile of the same device, model, dtype and settings, or a new one.

    A file that cannot be read is written over.
    """
    settings = settings or ProfileSettings()
    stored = json.loads(json.dumps(asdict(settings)))  # as it looks once read back
    subject = {**_subject(forward), "settings": stored}
    digest = hashlib.sha256(json.dumps(subject, sort_keys=True).encode()).hexdigest()[:16]
    path = Path(folder) / f"load-rates-{digest}.json"
    try:
        known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if {key: known.get(key) for key in subject} == subject:
            return known
    except (OSError, ValueError, AttributeError):
        pass
    text = json.dumps({**profile(forward, settings), "settings": stored}, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
    # As later starts read it: torch's version is of a class of torch's, which deciders do not have.
    new: dict[str, Any] = json.loads(text)
    return new


def profile(forward: Forward, settings: ProfileSettings | None = None) -> dict[str, Any]:
    """Measure an engine; the content of the arena's blocks is undefined afterwards.

    Raises:
        ValueError: blocks are in use, or the arena holds too few tokens for a line or a grid.
        TransferFailed: a copy failed or did not end.
    """
    with forward.ring.frozen():
        measured = _profiled(_Profiler(forward, settings or ProfileSettings()))
    return {**measured, "weights_s": _crossing_s(forward, measured["repeats"])}


def _profiled(profiler: _Profiler) -> dict[str, Any]:
    forward = profiler.forward
    shape, weights = forward.config.shape, forward.weights
    kv_elements = kv_bytes_per_token(shape) / shape.kv_dtype_bytes
    return {
        **_subject(forward),
        "layers": shape.layers,
        "kv_bytes_per_token": kv_elements * weights.dtype.itemsize,
        "activation_bytes_per_token": shape.layers * shape.hidden * weights.dtype.itemsize,
        "repeats": profiler.settings.repeats,
        "load": profiler.line(profiler.load_layers),
        "project": profiler.line(profiler.project_layers),
        "grid": profiler.grid(),
        **profiler.decode_grids(),
        "h2d_bytes_per_s": profiler.link_bytes_per_s(),
        **profiler.attention(),
    }


def _crossing_s(forward: Forward, repeats: int) -> float:
    """Seconds in which the weights in host memory cross the link for a step; 0 without any."""

    def cross() -> None:
        for layer in forward.ring.layers:
            forward.ring.used(layer)
            forward.ring.fetch(*GROUPS)
        forward.mover.drain()

    forward.ring.fetch(*GROUPS)
    device = forward.weights.device
    return min(elapsed_s(cross, device) for _ in range(repeats)) if forward.ring.layers else 0.0


def _subject(forward: Forward) -> dict[str, Any]:
    """The subject of a profile: device, model and dtype."""
    config, weights = forward.config, forward.weights
    return {
        "format": FORMAT,
        "device": device_name(weights.device),
        "torch": torch.__version__,
        "model": config.shape.name,
        "shape": [getattr(config, name) for name in _SHAPE],
        "dtype": str(weights.dtype).removeprefix("torch."),
        "host_weights": list(astuple(weights.host)),
        "cpu_threads": 0 if forward.cpu is None else forward.cpu.worker.threads,
        "block_tokens": forward.arena.block_tokens,
        # Without, steps behind activations are not measured.
        "activations": forward.arena.size.act_host > 0,
    }


class _Profiler:
    def __init__(self, forward: Forward, settings: ProfileSettings) -> None:
        arena = forward.arena
        used = [f"{place} {type}" for (type, place), pool in arena.pools.items() if pool.used]
        if used:
            raise ValueError(f"blocks are in use ({', '.join(used)}): profile before serving")
        self.forward, self.arena, self.mover = forward, arena, forward.mover
        self.config, self.weights = forward.config, forward.weights
        self.settings, self.device = settings, forward.weights.device
        room = min(arena.size.kv_device, arena.size.kv_host) * arena.block_tokens
        self.sizes = [n for n in settings.tokens if n <= room]
        if len(self.sizes) < 3:
            raise ValueError(
                f"the arena holds {room} tokens both on the device and in host memory, of the "
                f"sizes {settings.tokens} too few for a line: give more blocks, or smaller sizes"
            )

    def line(self, action: Callable[[int], Action]) -> dict[str, list[float]]:
        """Measure {"tokens", "seconds"}, in seconds of a layer."""
        least = self._in_turns([action(n) for n in self.sizes], min)
        return {
            "tokens": [float(n) for n in self.sizes],
            "seconds": [seconds / self.config.layers for seconds in least],
        }

    def load_layers(self, tokens: int) -> Action:
        """Load n tokens' KV of every layer, one layer after the other.

        Each call takes other blocks, as far as there are any: blocks that are still in a
        processor's cache would come too soon.
        """
        blocks = -(-tokens // self.arena.block_tokens)
        device, host = self.arena.kv_device, self.arena.kv_host
        turns = itertools.cycle(range(min(device.shape[1], host.shape[1]) // blocks))

        def load() -> None:
            at = next(turns) * blocks
            here = slice(at, at + blocks)
            for layer in range(self.config.layers):
                event = self.mover.h2d([(device[layer, here], host[layer, here])])
            event.block()

        return load

    def project_layers(self, tokens: int) -> Action:
        """Project n tokens of every layer."""
        weights, config = self.weights, self.config
        acts = torch.randn(tokens, config.hidden, device=self.device).to(weights.dtype)
        out = torch.empty(tokens, 2 * config.kv_width, dtype=acts.dtype, device=self.device)
        turned = self.forward.angles(torch.arange(tokens, device=self.device))

        @torch.no_grad()
        def project() -> None:
            for layer in range(config.layers):
                layers.project_kv(acts, self.forward.ring.layer(layer), config, turned, out)

        return project

    def attend_layers(self, tokens: int) -> Action:
        """Attend from one query to n tokens in every layer; to other blocks in each call."""
        forward, cpu, config = self.forward, self.forward.cpu, self.config
        assert cpu is not None
        q = torch.randn(1, config.heads, config.head_dim).to(self.device, self.weights.dtype)
        rows = torch.zeros(1, dtype=torch.int64, device=self.device)
        blocks = -(-tokens // self.arena.block_tokens)
        turns = itertools.cycle(range(max(1, self.arena.size.kv_host // blocks)))

        def attend() -> None:
            at = next(turns) * blocks
            on_cpu = OnCpu(rows, [HostContext(0, 1, np.arange(at, at + blocks))])
            for layer in range(config.layers):
                cpu.begin(layer, on_cpu, q, forward.mover)()

        return attend

    def grid(self) -> dict[str, list[Any]]:
        """Measure t_gpu(T, S): a prefill of T tokens behind S that are on the device."""
        size = self.arena.block_tokens
        room = min(self.arena.size.kv_device * size, self.config.max_tokens)
        context = [s for s in self.settings.context_tokens if s + 1 < room]
        most = room - max(context, default=0)
        new = [t for t in self.settings.new_tokens if 1 <= t <= most]
        if len(new) < 2 or len(context) < 2:
            raise ValueError(
                f"the arena and the model hold {room} tokens: too few for a grid of "
                f"{self.settings.new_tokens} by {self.settings.context_tokens}; give more blocks"
            )
        # Keys and values of ordinary size: denormal numbers would make arithmetic slow.
        self.arena.kv_device.normal_()

        def step_s(count: int, behind: int) -> float:
            tokens = np.arange(count + behind) % self.config.vocab
            pages = Pages(np.arange(-(-len(tokens) // size)))
            row = prompt_row(tokens, pages, start=behind)
            return self._least_s(lambda: self.forward.compute([row]))

        seconds = [[step_s(t, s) for s in context] for t in new]
        return {"new_tokens": new, "context_tokens": context, "seconds": seconds}

    def decode_grids(self) -> dict[str, Any]:
        """Measure {"decode": {"sequences", "resident_tokens", "seconds", "measured"}}, contexts on
        the device, and with activations in host memory "from_kv" and "from_acts", where they land
        in a pass's buffers as the one or the other, none crossing; {} without a grid.

        More context than the arena holds is read from the same blocks again. Where the model has no
        positions for so long a context, the row is continued by its last step; `measured` has how
        many cells of each row are no continuation.
        """
        sequences = [
            n for n in self.settings.decode_sequences if 1 <= n <= self.arena.size.kv_device
        ]
        resident = list(self.settings.decode_tokens)
        most = self.config.max_tokens - 1
        if len(sequences) < 2 or len([r for r in resident if r <= sequences[0] * most]) < 2:
            return {}
        sources = {"decode": Source.KV_DEVICE}
        if self.arena.size.act_host:
            sources |= {"from_kv": Source.KV_HOST, "from_acts": Source.ACT_HOST}
        return {name: self._decode_grid(sequences, of) for name, of in sources.items()}

    def _decode_grid(self, sequences: list[int], source: Source) -> dict[str, Any]:
        resident, most = list(self.settings.decode_tokens), self.config.max_tokens - 1
        contexts = [[total // n for total in resident if total // n <= most] for n in sequences]
        cells = zip(sequences, contexts, strict=True)
        steps = [self._decoding(n, each, source) for n, of in cells for each in of]
        # Where a split is to balance what computes and what crosses, what a step usually takes
        # counts, not what it could. All take turns.
        if source is Source.KV_DEVICE:
            found = iter(self._in_turns(steps, min))
        else:
            with self.forward.landed():
                found = iter(self._in_turns(steps, statistics.median))
        rows = [[next(found) for _ in of] for of in contexts]
        for row in rows:
            for done in range(len(row), len(resident)):
                slope = (row[-1] - row[-2]) / (resident[done - 1] - resident[done - 2])
                row.append(row[-1] + max(0.0, slope) * (resident[done] - resident[done - 1]))
        grid = {"sequences": sequences, "resident_tokens": resident, "seconds": rows}
        return {**grid, "measured": [len(of) for of in contexts]}

    def _decoding(self, sequences: int, context: int, source: Source) -> Action:
        """Compute one new token of each sequence behind `context`; blocks take turns."""
        size = self.arena.block_tokens
        held, tokens = -(-(context + 1) // size), np.arange(context + 1) % self.config.vocab
        rows = []
        for index in range(sequences):
            pages = Pages((index * held + np.arange(held)) % self.arena.size.kv_device)
            row = prompt_row(tokens, pages, start=context)
            if source is not Source.KV_DEVICE:
                # Full blocks in host memory, the others on the device; any ids, as none crosses.
                full = context // size
                pages.put(0, "kv", "device", [-1] * full)
                for type in ("kv", "act"):
                    pages.put(0, type, "host", index * full + np.arange(full))
                end = full * size
                spans = TokenSpan(source, 0, end), TokenSpan(Source.KV_DEVICE, end, context)
                row = replace(row, spans=joined([*spans, row.spans[-1]]))
            rows.append(row)
        return lambda: self.forward.compute(rows)

    def _in_turns(
        self, actions: Sequence[Action], figure: Callable[[Sequence[float]], float]
    ) -> list[float]:
        """A figure of the seconds of each action; they take turns, so that a machine that slows
        down slows all of them. The first round touches memory and compiles kernels."""
        for act in actions:
            act()
        rounds = [
            [elapsed_s(act, self.device) for act in actions] for _ in range(self.settings.repeats)
        ]
        return [figure(taken) for taken in zip(*rounds, strict=True)]

    def link_bytes_per_s(self) -> float:
        """The link's bytes/s for the largest size, all layers."""
        pairs = self._largest_load()
        size_bytes = sum(source.nbytes for _, source in pairs)

        def load_s() -> float:
            # The copies' own end, not the device's: beside them the other direction may be busy.
            start_s = time.perf_counter()
            self.mover.h2d(pairs).block()
            return time.perf_counter() - start_s

        load_s()
        return size_bytes / min(load_s() for _ in range(self.settings.repeats))

    def _largest_load(self) -> list[tuple[Tensor, Tensor]]:
        blocks = self.sizes[-1] // self.arena.block_tokens
        target, source = self.arena.kv_device, self.arena.kv_host
        return [(target[i, :blocks], source[i, :blocks]) for i in range(self.config.layers)]

    def attention(self) -> dict[str, Any]:
        """Measure {"attend": ...}: seconds of a layer by tokens, and the shares of their speed that
        it and the link leave each other; {} without threads for it.
        """
        if self.forward.cpu is None:
            return {}
        samples = self.line(self.attend_layers)
        most = self.attend_layers(self.sizes[-1])
        alone_s = self._least_s(most)
        pairs = self._largest_load()
        with repeating(lambda: self.mover.h2d(pairs).block()):
            beside_s = self._least_s(most)
        with repeating(most):
            link = self.link_bytes_per_s()
        threads, share = self.forward.cpu.worker.threads, alone_s / beside_s
        beside = {"threads": threads, "h2d_bytes_per_s": link, "share_while_loading": share}
        return {"attend": {**samples, **beside}, **self.products()}

    def products(self) -> dict[str, Any]:
        """Measure {"multiply": seconds of a layer by tokens, of FC1 in host memory on the CPU}, and
        the bytes of a layer's matrices; {} where they are on the device."""
        forward, cpu = self.forward, self.forward.cpu
        if cpu is None or len(forward.ring.layers) < self.config.layers:
            return {}
        fc1s = [layer.up for layer in self.weights.layers]

        def multiply(tokens: int) -> float:
            x = torch.randn(tokens, self.config.hidden).to(self.device, self.weights.dtype)
            return self._least_s(lambda: [result(cpu.product(x, fc1)) for fc1 in fc1s])

        sizes = [1, 8, 32, 64]
        seconds = [multiply(n) / self.config.layers for n in sizes]
        one = self.weights.layers[0]
        matrices = one.kv.nbytes + one.q.nbytes, one.out.nbytes, one.up.nbytes, one.down.nbytes
        return {"multiply": {"tokens": sizes, "seconds": seconds}, "matrix_bytes": list(matrices)}

    def _least_s(self, action: Action) -> float:
        action()
        return min(elapsed_s(action, self.device) for _ in range(self.settings.repeats))

"""Measures what load plans are made of, with the engine's own weights, arena, mover and forward.

Seconds to load n tokens' KV of a layer and to project n tokens' activations, each copy or product
behind the one before as in a pass; a grid of prefill steps, t_gpu(T, S); and the link's bandwidth
alone, scattered over blocks, while the device stores, and while the CPU computes. The result is
JSON that `kappa.plans.measured.rates_from_measured` fits, or refuses. Runs before the engine
serves: it needs the arena to itself, and writes over its blocks. CUDA and CPU take the same path.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine import layers
from engine.forward import Forward
from engine.layers import angles, frequencies
from engine.prefill import Prompt, prefill
from engine.profiling_decode import attention, decoding, repeating
from engine.step import Pages
from kappa.model import kv_bytes_per_token
from kappa.plans.measured import FORMAT

_BUSY_SIDE = 512


@dataclass(frozen=True, slots=True)
class ProfileSettings:
    """What to measure.

    tokens: sizes for the two lines, in tokens of one sequence; at least three, and those that the
    arena cannot hold are left out. new_tokens, context_tokens: the grid's axes, cut likewise.
    decode_sequences, decode_tokens: axes of the decoding steps: sequences, context tokens of all.
    repeats: of each figure; the least counts, since what else runs on the machine only adds to it,
    and the spread is told beside. busy_threads: that compute on the CPU for the figure under load;
    0: one for each thread of torch.
    """

    tokens: tuple[int, ...] = (128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096)
    new_tokens: tuple[int, ...] = (1, 16, 64, 128, 256, 512, 1024, 2048)
    context_tokens: tuple[int, ...] = (0, 512, 2048, 8192)
    decode_sequences: tuple[int, ...] = (1, 4, 16, 64)
    decode_tokens: tuple[int, ...] = (0, 1024, 4096, 16384)
    repeats: int = 9
    busy_threads: int = 0

    def __post_init__(self) -> None:
        axes = ("tokens", "new_tokens", "context_tokens", "decode_sequences", "decode_tokens")
        for name in axes:
            values = getattr(self, name)
            if list(values) != sorted(set(values)) or (values and values[0] < 0):
                raise ValueError(f"ProfileSettings.{name} is {values}: give ascending counts")
        if self.repeats < 1 or self.busy_threads < 0:
            raise ValueError(
                f"ProfileSettings: repeats {self.repeats}, busy_threads {self.busy_threads}: "
                "give one repeat or more, and no negative number of threads"
            )


def profile(forward: Forward, settings: ProfileSettings | None = None) -> dict[str, Any]:
    """Measure; blocks of the arena's pools hold anything afterwards.

    Raises:
        ValueError: blocks are in use, or the arena holds too few tokens for a line or a grid.
        TransferFailed: a copy failed or did not end.
    """
    return _Profiler(forward, settings or ProfileSettings()).run()


def cached_profile(
    forward: Forward, folder: str | Path, settings: ProfileSettings | None = None
) -> dict[str, Any]:
    """What an earlier run measured with the same device, model, dtype and settings; else measure.

    A file that cannot be read counts as none, and is written over.
    """
    settings = settings or ProfileSettings()
    subject = {**_subject(forward), "settings": _plain(asdict(settings))}
    digest = hashlib.sha256(json.dumps(subject, sort_keys=True).encode()).hexdigest()[:16]
    path = Path(folder) / f"load-rates-{digest}.json"
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        if {key: known.get(key) for key in subject} == subject:
            return known
    except (OSError, ValueError, AttributeError):
        pass
    measured = {**profile(forward, settings), "settings": subject["settings"]}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(measured, indent=1), encoding="utf-8")
    part.replace(path)
    return measured


def device_name(device: torch.device) -> str:
    """The accelerator's name, or the processor's and its threads."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"cpu, {torch.get_num_threads()} threads"


def _subject(forward: Forward) -> dict[str, Any]:
    """What a profile is a profile of."""
    config, weights = forward.config, forward.weights
    return {
        "format": FORMAT,
        "device": device_name(weights.device),
        "torch": torch.__version__,
        "model": config.shape.name,
        "shape": [config.layers, config.hidden, config.heads, config.kv_heads, config.head_dim,
                  config.inner, config.vocab],
        "dtype": str(weights.dtype).removeprefix("torch."),
        "streamed": weights.streamed,
        "cpu_threads": 0 if forward.cpu is None else forward.cpu.worker.threads,
        "block_tokens": forward.arena.block_tokens,
    }  # fmt: skip


def _plain(data: dict[str, Any]) -> dict[str, Any]:
    """As it looks once read back from JSON."""
    plain: dict[str, Any] = json.loads(json.dumps(data))
    return plain


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

    def run(self) -> dict[str, Any]:
        shape, dtype = self.config.shape, self.weights.dtype
        kv_elements = kv_bytes_per_token(shape) / shape.kv_dtype_bytes
        alone = self._link_bytes_per_s()
        return {
            **_subject(self.forward),
            "layers": self.config.layers,
            "kv_bytes_per_token": kv_elements * dtype.itemsize,
            "activation_bytes_per_token": shape.layers * shape.hidden * dtype.itemsize,
            "weight_bytes": self.config.layers * self.weights.layer_bytes,
            "repeats": self.settings.repeats,
            "load": self._line(self._load_layers),
            "project": self._line(self._projection()),
            "grid": self._grid(),
            **decoding(
                self.forward,
                self.settings.decode_sequences,
                self.settings.decode_tokens,
                self._least_s,
            ),
            "h2d_bytes_per_s": alone,
            "h2d_scattered_bytes_per_s": self._link_bytes_per_s(scattered=True),
            "h2d_while_storing_bytes_per_s": self._while_storing(),
            "h2d_cpu_busy_bytes_per_s": self._while_cpu_busy(),
            **attention(
                self.forward, self.sizes, self._line, self._least_s, self._link_bytes_per_s
            ),
        }

    # -- lines ----------------------------------------------------------------------------------

    def _line(self, action: Callable[[int], Callable[[], None]]) -> dict[str, list[float]]:
        """{"tokens", "seconds", "spread"}: seconds of a layer; spread is IQR over median.

        Sizes take turns, so that a machine that slows down slows all of them.
        """
        actions = [action(n) for n in self.sizes]
        times: list[list[float]] = [[] for _ in actions]
        for repeat in range(self.settings.repeats + 1):
            for act, taken in zip(actions, times, strict=True):
                seconds = self._seconds(act)
                if repeat:  # the first touches memory and compiles kernels
                    taken.append(seconds / self.config.layers)
        return {
            "tokens": [float(n) for n in self.sizes],
            "seconds": [min(taken) for taken in times],
            "spread": [_spread(taken) for taken in times],
        }

    def _load_layers(self, tokens: int) -> Callable[[], None]:
        """Bring n tokens' KV of every layer, one after the other.

        Each time other blocks, as many as there are: what a processor's cache has still got from
        the last time would come too soon.
        """
        blocks = -(-tokens // self.arena.block_tokens)
        device, host = self.arena.kv_device, self.arena.kv_host
        places = min(device.shape[1], host.shape[1]) // blocks
        turns = itertools.cycle(range(places))

        def load() -> None:
            at = next(turns) * blocks
            here = slice(at, at + blocks)
            events = [
                self.mover.h2d([(device[i, here], host[i, here])])
                for i in range(self.config.layers)
            ]
            events[-1].block()

        return load

    def _projection(self) -> Callable[[int], Callable[[], None]]:
        """Project n tokens of every layer; streamed weights are as if they were there."""
        weights, config = self.weights, self.config
        if weights.streamed:
            here = [weights.view(weights.layers[0].to(self.device))] * config.layers
        else:
            here = [weights.layer(i) for i in range(config.layers)]

        def of(tokens: int) -> Callable[[], None]:
            acts = torch.randn(tokens, config.hidden, device=self.device).to(weights.dtype)
            out = torch.empty(tokens, 2 * config.kv_width, dtype=acts.dtype, device=self.device)
            turned = self._angles(tokens)

            @torch.no_grad()
            def project() -> None:
                for layer in here:
                    layers.project_kv(acts, layer, config, turned, out)

            return project

        return of

    def _angles(self, tokens: int) -> layers.Angles:
        if not self.config.rope:
            return None
        inverse, factor = frequencies(self.config.rope, self.config.head_dim)
        positions = torch.arange(tokens, device=self.device)
        return angles(positions, inverse.to(self.device), factor, self.weights.dtype)

    # -- grid -----------------------------------------------------------------------------------

    def _grid(self) -> dict[str, list[Any]]:
        """t_gpu(T, S): a prefill of T tokens behind S that are on the device."""
        room = min(self.arena.size.kv_device * self.arena.block_tokens, self.config.max_tokens)
        context = [s for s in self.settings.context_tokens if s + 1 < room]
        most = room - max(context, default=0)
        new = [t for t in self.settings.new_tokens if 1 <= t <= most]
        if len(new) < 2 or len(context) < 2:
            raise ValueError(
                f"the arena and the model hold {room} tokens: too few for a grid of "
                f"{self.settings.new_tokens} by {self.settings.context_tokens}; give more blocks"
            )
        self._clean()
        return {
            "new_tokens": new,
            "context_tokens": context,
            "seconds": [[self._step_s(t, s) for s in context] for t in new],
        }

    def _clean(self) -> None:
        """Keys and values of ordinary size: nothing that makes arithmetic slow."""
        self.arena.kv_device.normal_()

    def _step_s(self, new: int, context: int) -> float:
        blocks = -(-(new + context) // self.arena.block_tokens)
        pages = Pages()
        pages.put(0, "kv", "device", np.arange(blocks))
        tokens = np.arange(new + context) % self.config.vocab
        prompt = Prompt(tokens, pages, start_tokens=context)

        def step() -> None:
            prefill(self.forward, [prompt])

        return self._least_s(step)

    # -- link -----------------------------------------------------------------------------------

    def _link_bytes_per_s(self, *, scattered: bool = False) -> float:
        """Bytes/s of the largest size, all layers, in one run of blocks or one block at a time."""
        blocks = self.sizes[-1] // self.arena.block_tokens
        target, source = self.arena.kv_device, self.arena.kv_host
        if scattered:
            order = np.random.default_rng(0).permutation(blocks).tolist()
            pairs = [
                (target[i, to], source[i, block])
                for i in range(self.config.layers)
                for to, block in enumerate(order)
            ]
        else:
            pairs = [(target[i, :blocks], source[i, :blocks]) for i in range(self.config.layers)]
        size_bytes = sum(source.nbytes for _, source in pairs)

        def load_s() -> float:
            # The copies' own end, not the device's: beside them the other direction may be busy.
            start_s = time.perf_counter()
            self.mover.h2d(pairs).block()
            return time.perf_counter() - start_s

        load_s()
        return size_bytes / min(load_s() for _ in range(self.settings.repeats))

    def _while_storing(self) -> float:
        """As alone, while the other direction copies, over and over."""
        blocks = self.sizes[-1] // self.arena.block_tokens
        source = self.arena.kv_device[0, :blocks].clone()
        target = torch.empty(
            source.shape, dtype=source.dtype, pin_memory=self.device.type == "cuda"
        )
        with repeating(lambda: self.mover.d2h([(target, source)]).block()):
            return self._link_bytes_per_s()

    def _while_cpu_busy(self) -> float:
        """As alone, while threads multiply matrices on the CPU."""
        threads = self.settings.busy_threads or torch.get_num_threads()
        square = torch.randn(_BUSY_SIDE, _BUSY_SIDE)
        with repeating(lambda: torch.mm(square, square), threads):
            return self._link_bytes_per_s()

    # -- time -----------------------------------------------------------------------------------

    def _seconds(self, action: Callable[[], Any]) -> float:
        self._finish()
        start_s = time.perf_counter()
        action()
        self._finish()
        return time.perf_counter() - start_s

    def _least_s(self, action: Callable[[], Any]) -> float:
        action()
        return min(self._seconds(action) for _ in range(self.settings.repeats))

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _spread(values: list[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / middle

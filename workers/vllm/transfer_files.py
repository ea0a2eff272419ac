"""KV blocks on their way from a prefill worker to a decode worker of one machine, as files in
shared memory, under a name that only the sender chose. Whole files appear at once; what nobody
receives is swept; the folder never holds more than its bound. A paced transfer lasts as long as on
the named network, in dilated time."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from workers.vllm.options import NetworkPace

_NAME = re.compile(r"[0-9a-f]{32}")
_FILE = re.compile(r"[0-9a-f]{32}-\d+\.(kv|part|refused)")
_POLL_S = 0.005


class TransferError(Exception):
    """Blocks that did not come; the message says why. Their tokens are computed again."""


class TransferOptions(NetworkPace, frozen=True, forbid_unknown_fields=True):
    """wait_s: how long a receiver waits beyond the pace, and after how long files are swept."""

    folder: str
    most_bytes: int
    wait_s: float


class TransferFiles:
    """The folder that senders write to and receivers read from."""

    def __init__(
        self,
        options: TransferOptions,
        rank: int = 0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """rank: of an engine's process, each of which hands its own part over. OSError: the folder
        cannot be made, is another user's, or is open to others."""
        self._folder = folder = Path(options.folder)
        self._options, self._rank, self._clock, self._sleep = options, rank, clock, sleep
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = folder.stat()
        if found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise PermissionError(
                f"transfer.folder {folder} is another user's or open to others, and KV cache is as "
                "good as text: name a folder that is yours alone (mode 700), or that does not exist"
            )
        # What processes that are long gone have left takes memory until somebody sends again.
        self.sweep()

    def send(self, name: str, blocks: Sequence[torch.Tensor], tokens: int) -> None:
        """Write a request's blocks, int8 tensors of (blocks, bytes of one), and pace it. A transfer
        that finds no room is refused, and its receiver learns so at once."""
        start_s = self._clock()
        path = self._path(name)
        refused, part = path.with_suffix(".refused"), path.with_suffix(".part")
        held_bytes = self.sweep()
        if held_bytes + sum(tensor.nbytes for tensor in blocks) > self._options.most_bytes:
            refused.touch()
            return
        try:
            save_file({str(i): t.contiguous() for i, t in enumerate(blocks)}, part)
        except (OSError, SafetensorError):
            # No memory: what is there in part takes some, and nobody must wait for it.
            part.unlink(missing_ok=True)
            refused.touch()
            raise
        remaining_s = start_s + self._options.pace_s(tokens) - self._clock()
        if remaining_s > 0:
            self._sleep(remaining_s)
        part.replace(path)

    def receive(self, name: str, tokens: int, since_s: float | None = None) -> list[torch.Tensor]:
        """Wait for a transfer, read it, remove it. since_s: when the wait began, on this object's
        clock; none: now. What is there is received however long ago that was.

        Raises:
            TransferError: it did not come in time, was refused, or cannot be read.
        """
        path = self._path(name)
        refused = path.with_suffix(".refused")
        began_s = self._clock() if since_s is None else since_s
        deadline_s = began_s + self._options.wait_s + self._options.pace_s(tokens)
        while not path.exists():
            if refused.exists():
                refused.unlink(missing_ok=True)
                raise TransferError("refused: no room for it")
            if self._clock() >= deadline_s:
                raise TransferError(f"not there after {self._options.wait_s:g} s")
            self._sleep(_POLL_S)
        try:
            tensors = load_file(path)
            return [tensors[str(i)] for i in range(len(tensors))]
        except (OSError, SafetensorError, KeyError) as error:
            raise TransferError(f"cannot be read: {type(error).__name__}") from None
        finally:
            path.unlink(missing_ok=True)

    def sweep(self) -> int:
        """Remove what nobody received in time; returns the bytes of what is left."""
        left_bytes = 0
        for path, found in self._files():
            if time.time() - found.st_mtime > 2 * self._options.wait_s + 60:
                path.unlink(missing_ok=True)
            else:
                left_bytes += found.st_size
        return left_bytes

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        """Files of transfers; whatever else lies in the folder is not ours to count or remove."""
        for path in self._folder.iterdir():
            if not _FILE.fullmatch(path.name):
                continue
            try:
                found = path.lstat()
            except FileNotFoundError:
                continue
            if stat.S_ISREG(found.st_mode):
                yield path, found

    def _path(self, name: str) -> Path:
        # A name reaches us by way of the request: it must not lead out of the folder.
        if not _NAME.fullmatch(name):
            raise TransferError("its name is none of ours")
        return self._folder / f"{name}-{self._rank}.kv"

"""Sets of workers, each kept once: who holds a block, on the device and in host.

Blocks of one prompt mostly have the same holders, so a block stores the number of its set. A set
is one integer with two bits a worker (2i on the device, 2i+1 in host): intersecting two of a
thousand workers takes 50 ns.
"""

from __future__ import annotations

import sys

NOBODY = 0


class HolderSets:
    """Sets by number, with the count of blocks that refer to each; set 0 is nobody's."""

    def __init__(self) -> None:
        self.bits: list[int] = [0]
        self.blocks: list[int] = [0]
        self._number: dict[int, int] = {0: NOBODY}
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._number)

    def move(self, old: int, bits: int, blocks: int) -> int:
        """`blocks` blocks go from set `old` to the set of these bits; returns its number."""
        number = self._number.get(bits)
        if number is None:
            number = self._free.pop() if self._free else len(self.bits)
            if number == len(self.bits):
                self.bits.append(bits)
                self.blocks.append(0)
            else:
                self.bits[number] = bits
            self._number[bits] = number
        self.blocks[number] += blocks
        self.leave(old, blocks)
        return number

    def leave(self, number: int, blocks: int) -> None:
        """`blocks` blocks refer to a set no more."""
        self.blocks[number] -= blocks
        if number and not self.blocks[number]:
            del self._number[self.bits[number]]
            self.bits[number] = 0
            self._free.append(number)

    def numbers(self) -> list[int]:
        """The sets in use."""
        return list(self._number.values())

    def nbytes(self) -> int:
        """Bytes of all sets and their tables, Python's objects included."""
        tables = (self.bits, self.blocks, self._number, self._free)
        objects = sum(map(sys.getsizeof, self.bits)) + 32 * 2 * len(self.bits)
        return sum(map(sys.getsizeof, tables)) + objects

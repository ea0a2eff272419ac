"""The hits of a prompt in the index, worker by worker. No state: a table goes in.

One compiled loop goes along a prompt's rows and finds where their holders change; the sets of
holders are looked at only there, and no further once no worker is left. So holes need no care: they
are where a worker is missing from a set. A binary search would need every worker's contiguous run
to be maintained block by block on each change, and 13 look-ups a worker and tier; one walk answers
for all at once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kappa.compiled import compiled
from kappa_router.index.block_table import BlockTable, Int64s
from kappa_router.index.hash_table import UInt64s
from kappa_router.index.holders import TIER_BITS, Holder, Holders, longest_end
from kappa_router.index.kv_event_types import Tier

# Blocks that are walked before it is checked whether anybody still holds them.
_BATCH = 512


class Match(NamedTuple):
    """Leading blocks a worker holds: on the device, then how many further ones in its tiers behind
    that, and how many of these on disk alone."""

    device_blocks: int
    host_blocks: int
    disk_blocks: int = 0


def match(table: BlockTable, holders: Holders, prefix_hashes: UInt64s, blocks: Int64s) -> None:
    """Fill in the leading blocks that each worker holds, and mark them as recently used.

    blocks: zeros, shape (3, columns): on the device, further ones behind it, and those of
    them on disk alone.
    """
    for workers, found in _matches(table, holders, prefix_hashes):
        _spread(_bytes_of(workers), TIER_BITS, *found, blocks)


def end_in_all_groups(
    table: BlockTable, holders: Holders, prefix_hashes: UInt64s, blocks: Int64s
) -> None:
    """Shorten hits of hybrid models to where all their cache groups have what they need.

    blocks: as `match` filled it in.
    """
    found = [
        # Where no group needs the whole prefix, blocks of the others anywhere may do.
        blocks[:, cache.bit].tolist() if cache.heard else [len(prefix_hashes), 0, 0]
        for cache in holders.hybrids
    ]
    longest = max(device + behind for device, behind, _ in found)
    if not longest:
        return
    rows, _ = table.find(prefix_hashes[:longest])
    numbers, at = np.unique(table.holders[rows], return_inverse=True)
    sets = [table.sets.bits[number] for number in numbers.tolist()]
    for cache, (device, behind, disk) in zip(holders.hybrids, found, strict=True):

        def fitting(limit: int, tier: Tier | None, cache: Holder = cache) -> int:
            return longest_end(
                min(limit, len(at)),
                (
                    (np.array([bits & group.bits(tier) > 0 for bits in sets])[at],
                     group.needed, group.stride)
                    for group in cache.groups.values()
                ),
            )  # fmt: skip

        here = fitting(device, "device") if device else 0
        reach = fitting(device + behind, None) if behind or not cache.heard else here
        # What ends on the device cannot be completed from behind it.
        behind = reach - here if reach > device or not cache.heard else 0
        blocks[:, cache.bit] = here, behind, min(disk, behind)


def held_blocks(table: BlockTable, columns: int) -> Int64s:
    """Blocks held by each worker in each tier, shape (columns, tiers)."""
    sets, counts = table.sets, np.zeros((columns, TIER_BITS), dtype=np.int64)
    numbers, size = sets.numbers(), -(-columns * TIER_BITS // 8)
    for at in range(0, len(numbers), _BATCH):
        some = numbers[at : at + _BATCH]
        packed = b"".join(sets.bits[n].to_bytes(size, "little") for n in some)
        rows_of_bits = np.frombuffer(packed, np.uint8).reshape(len(some), size)
        bits = np.unpackbits(rows_of_bits, axis=1, count=counts.size, bitorder="little")
        each = np.array([sets.blocks[n] for n in some], dtype=np.int64)
        counts += (each @ bits).reshape(counts.shape)
    return counts


def compile_loops() -> None:
    """Compile now rather than while the first request waits."""
    _spread(_bytes_of(0), TIER_BITS, 0, 0, 0, np.empty((3, 0), dtype=np.int64))


def _matches(
    table: BlockTable, holders: Holders, prefix_hashes: UInt64s
) -> list[tuple[int, Match]]:
    """The hits of workers, in groups with the same; a group is a set of device bits."""
    device, disk_users = holders.device_bits, holders.disk_users
    bits = table.sets.bits
    answer: list[tuple[int, Match]] = []
    # Of the workers with a run that goes on behind the device: where it began, and how much of it
    # is on disk alone; `disk_only`: those that have the last blocks so.
    hosts = list[tuple[int, int, int]]()
    disk_only, since = 0, 0
    at, total, batch, more = 0, len(prefix_hashes), _BATCH, True
    while more and at < total and (device or hosts):
        changes, passed, more = table.walk(prefix_hashes[at : at + batch])
        for start, number in changes:
            held, here = bits[number], at + start
            in_host = held >> 1
            if disk_users:
                hosts = _with_disk(hosts, disk_only, here - since)
                disk_only = held >> 2 & ~in_host & disk_users
                in_host, since = in_host | disk_only, here
            if hosts:
                for group, begin, disk in hosts:
                    if group & ~in_host:
                        answer.append((group & ~in_host, Match(begin, here - begin, disk)))
                hosts = [(g & in_host, begin, disk) for g, begin, disk in hosts if g & in_host]
            ended = device & ~held
            if ended:
                device &= held
                begin = ended & in_host
                if begin:
                    hosts.append((begin, here, 0))
                if here and ended != begin:
                    answer.append((ended ^ begin, Match(here, 0)))
            if not device and not hosts:
                return answer
        at, batch = at + passed, 2 * batch
    if at and device:
        answer.append((device, Match(at, 0)))
    hosts = _with_disk(hosts, disk_only, at - since)
    answer += ((group, Match(begin, at - begin, disk)) for group, begin, disk in hosts)
    return answer


def _with_disk(
    runs: list[tuple[int, int, int]], disk_only: int, blocks: int
) -> list[tuple[int, int, int]]:
    """Groups of workers by run, once those in `disk_only` have `blocks` more on disk alone."""
    if not disk_only:
        return runs
    parts = [(g & disk_only, begin, disk + blocks) for g, begin, disk in runs]
    parts += [(g & ~disk_only, begin, disk) for g, begin, disk in runs]
    return [part for part in parts if part[0]]


def _bytes_of(workers: int) -> NDArray[np.uint8]:
    """Bits of workers as bytes, the lowest first."""
    size = workers.bit_length() // 8 + 1
    return np.frombuffer(bytearray(workers.to_bytes(size, "little")), np.uint8)


@compiled
def _spread(
    bits: NDArray[np.uint8], width: int, device: int, host: int, disk: int, blocks: Int64s
) -> None:
    """Fill in a `Match` for each worker with its device bit set, a column each.
    width: bits of a worker."""
    for worker in range(blocks.shape[1]):
        place = width * worker
        if place >> 3 >= len(bits):
            return
        if bits[place >> 3] >> (place & 7) & 1:
            blocks[0, worker], blocks[1, worker], blocks[2, worker] = device, host, disk

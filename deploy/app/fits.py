"""What goes together: settings with one another, and pools with a cluster's machines. Pure.

Looked at before anything starts, and after the command line's options have been applied; all faults
are reported at once. Ray would leave a worker that fits nowhere pending for ever; here it is an
error, with what is missing and what there is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from deploy.app.machine import Machine
from deploy.app.plan import ranks_of, worker_demand
from kappa.settings.cluster import ClusterSettings
from kappa.settings.pools import PoolSettings
from kappa.settings.routing import FETCHING_POLICY

_REASONS_SHOWN = 3
# Ray counts in ten-thousandths.
_ROUNDING = 1e-5


def contradictions(settings: ClusterSettings) -> list[str]:
    """Settings that are sound one by one and do not go together."""
    checks = (_of_engines, _of_tiers, _of_peers, _of_roles, _of_adapters)
    found = [fault for of_one in settings.by_model() for check in checks for fault in check(of_one)]
    return list(dict.fromkeys(found))


def _of_engines(settings: ClusterSettings) -> Iterator[str]:
    kind, pools = settings.engine.kind, settings.all_pools
    paced = ", ".join(pool.name for pool in pools if pool.paced)
    unpaced = ", ".join(pool.name for pool in pools if not pool.paced)
    if kind == "torch" and paced:
        yield (
            f"engine.kind is torch, which cannot be paced, but nodes {paced} are: say "
            "'paced: false' for each, or start with --unpaced"
        )
    if kind == "emulated" and unpaced:
        yield (
            f"engine.kind is emulated, which has no speed but its pace, and nodes {unpaced} are "
            "not paced: say 'paced: true' for each"
        )
    if kind == "torch" and settings.scheduler.name == "stock":
        yield (
            "scheduler.name is stock, which is vLLM's own: with engine.kind torch name another "
            "rule, such as fair"
        )
    chosen = [name for name in ("block_tokens", "dtype") if getattr(settings.engine, name) is None]
    gpus = {bool(pool.placement.gpus) for pool in pools}
    if kind == "vllm" and len(gpus) > 1 and chosen:
        yield (
            "some pools are on GPUs, where vLLM chooses what is not given, and some on CPUs, and "
            f"none could use another's blocks: give engine.{' and engine.'.join(chosen)}"
        )
    for pool in pools:
        engine, place = pool.engine_settings(settings.engine), pool.placement
        if engine.host_tier == "lmcache" and not engine.block_tokens:
            yield (
                f"pool {pool.name}: host_tier lmcache must know the size of blocks, which vLLM is "
                "to choose: give engine.block_tokens"
            )
        tp, stages = ranks_of(engine, place.gpus)
        if kind == "vllm" and tp * stages != max(place.gpus, 1):
            yield (
                f"pool {pool.name}: engine.extra divides a worker among {tp * stages} ranks "
                f"(tensor_parallel_size {tp}, pipeline_parallel_size {stages}), and its "
                f"placement.gpus is {place.gpus}: give as many"
            )
        if kind == "torch" and place.gpus > 1:
            yield (
                f"pool {pool.name}: engine.kind torch runs on one GPU, and placement.gpus is "
                f"{place.gpus}: give 1, and more replicas"
            )
    on_gpus = ", ".join(pool.name for pool in pools if pool.paced and pool.placement.gpus)
    if on_gpus:
        yield f"pools {on_gpus} have GPUs and are paced: a GPU has its own speed; drop one"


def _of_tiers(settings: ClusterSettings) -> Iterator[str]:
    link = settings.scheduler
    for pool in settings.all_pools:
        engine, gpus = pool.engine_settings(settings.engine), pool.placement.gpus
        tier, who = engine.tier_on(gpus), f"pool {pool.name}: engine."
        if tier == "stock":
            yield from _of_stock(settings, pool, who)
        if engine.kind != "vllm" or engine.host_bytes == 0:
            continue
        if engine.disk_bytes and gpus:
            yield (
                f"{who}disk_bytes is {engine.disk_bytes:,} and placement.gpus {gpus}: ours copies "
                "between tensors of a CPU, and vLLM's own tiering (0.29) never removes a file, so "
                "no size holds it; leave disk_bytes and disk_dir out for pools with GPUs"
            )
        if engine.disk_bytes and link.link_order == "fifo":
            yield (
                f"{who}disk_bytes needs scheduler.link_order loads_first, and it is fifo, which is "
                "vLLM's own order and knows no disk"
            )
        if engine.disk_bytes and pool.paced:
            yield f"{who}disk_bytes is a real disk, and the pool is paced: leave it out there"
        if tier == "own" and gpus:
            yield (
                f"{who}host_tier own copies between tensors of a CPU and cannot reach a GPU's: say "
                "auto or native, with which vLLM copies"
            )
        if engine.load == "layers" and (gpus or link.name == "stock"):
            yield (
                f"{who}load layers is of host_tier own, on CPUs, under a scheduling rule of ours, "
                f"and placement.gpus is {gpus}, scheduler.name {link.name}: say ahead"
            )
        if tier == "native" and not gpus:
            yield f"{who}host_tier native needs a GPU, and placement.gpus is 0: say auto or own"
        if tier == "native" and link.duplex == "half":
            yield (
                f"{who}host_tier native copies each way in a stream of its own, and "
                "scheduler.duplex is half: say full"
            )


def _of_peers(settings: ClusterSettings) -> Iterator[str]:
    """What keeps workers from reading each other's host tiers, where they are to."""
    hands_over = any(pool.role != "both" for pool in settings.all_pools)
    if settings.router.policy == FETCHING_POLICY:
        asks, remedy = f"router.policy {FETCHING_POLICY}", "name policy priced"
    elif hands_over and settings.transfer.connector == "peers":
        asks, remedy = "transfer.connector peers", "make every pool's role both"
    else:
        return
    reading = f"{asks} has workers read each other's host tiers"
    if settings.engine.kind != "vllm":
        yield f"{reading}, and engine.kind is {settings.engine.kind}, which cannot: {remedy}"
        return
    for pool in settings.all_pools:
        engine = pool.engine_settings(settings.engine)
        tier = engine.tier_on(pool.placement.gpus)
        if tier not in ("own", "native") or engine.host_bytes == 0:
            has = f"host tier is {tier}" if engine.host_bytes != 0 else "engine.host_bytes is 0"
            yield (
                f"{reading}, which host_tier auto can, and pool {pool.name}'s {has}: {remedy}, or "
                "change the pool"
            )
        elif engine.disk_bytes:
            yield (
                f"{asks} has workers read host memory alone, and pool {pool.name} has "
                f"engine.disk_bytes: leave it out, or {remedy}"
            )
        elif settings.scheduler.link_order == "fifo":
            yield (
                f"{asks} needs scheduler.link_order loads_first, and it is fifo, which is vLLM's "
                "own manager of host memory"
            )


def _of_stock(settings: ClusterSettings, pool: PoolSettings, who: str) -> Iterator[str]:
    """What an engine cannot do in which nothing of ours runs."""
    asks = f"{who}host_tier stock leaves the engine as vLLM makes it"
    if settings.scheduler.name != "stock":
        yield f"{asks}, and scheduler.name is {settings.scheduler.name}: say stock, too"
    if pool.paced:
        yield f"{asks}, which cannot be paced: say 'paced: false'"
    if pool.role != "both":
        yield f"{asks}, which hands nothing over, and the pool's role is {pool.role}: say both"
    if pool.engine_settings(settings.engine).host_bytes != 0 and not pool.placement.gpus:
        yield f"{asks}, whose copies need a GPU, and placement.gpus is 0: say host_bytes: 0"


def _of_roles(settings: ClusterSettings) -> Iterator[str]:
    """What vLLM's own hand-over needs; that of peers needs what `_of_peers` says."""
    pools = settings.all_pools
    if settings.transfer.connector != "nixl" or all(pool.role == "both" for pool in pools):
        return
    if settings.engine.kind != "vllm":
        yield (
            f"engine.kind is {settings.engine.kind}, which cannot hand KV over: make every pool's "
            "role both"
        )
        return
    for pool in pools:
        engine, who = pool.engine_settings(settings.engine), f"pool {pool.name}"
        if engine.host_bytes == 0:
            yield f"{who} hands KV over or takes it, which needs engine.host_bytes above 0"
        if not pool.placement.gpus:
            yield (
                f"{who} has no GPU, and transfer.connector is nixl, which vLLM's CPU build lacks: "
                "say peers"
            )


def _of_adapters(settings: ClusterSettings) -> Iterator[str]:
    if not settings.model.adapters:
        return
    who = f"model {settings.model.id} has adapters, which"
    if settings.engine.kind != "vllm":
        yield f"{who} engine.kind {settings.engine.kind} does not serve: say vllm"
    for pool in settings.all_pools:
        if pool.engine_settings(settings.engine).tier_on(pool.placement.gpus) == "lmcache":
            yield (
                f"{who} LMCache's keys do not know (KV of one would be taken for another's): pool "
                f"{pool.name} needs another engine.host_tier"
            )


# -- pools and machines ---------------------------------------------------------------------------


def misfits(pools: Sequence[PoolSettings], machines: Sequence[Machine]) -> dict[str, str]:
    """Every pool that fits no machine, and how many workers of the others find no place: by the
    pool's name, with the place in the settings and what to change."""
    faults, fitting = {}, []
    for number, pool in enumerate(pools):
        lacking = sorted(
            ((machine.lacks(pool), machine.name) for machine in machines),
            key=lambda found: len(found[0]),
        )
        if any(not lacks for lacks, _ in lacking):
            fitting.append(pool)
            continue
        reasons = dict.fromkeys(f"{name} has {', '.join(lacks)}" for lacks, name in lacking)
        why = "; ".join(list(reasons)[:_REASONS_SHOWN]) or "there is none"
        faults[pool.name] = (
            f"pools.{number}.placement: pool {pool.name} fits none of {len(lacking)} machine(s): "
            f"{why}. Change its placement, or add a machine that offers it"
            f"{_of_ranks(pool, machines)}"
        )
    return faults | dict(_without_place(fitting, machines))


def _of_ranks(pool: PoolSettings, machines: Sequence[Machine]) -> str:
    """What to say where machines have a worker's GPUs together, and none alone."""
    gpus, offered = pool.placement.gpus, [machine.offers.get("GPU", 0) for machine in machines]
    if gpus <= max(offered, default=0) or gpus > sum(offered):
        return ""
    return (
        f". All {gpus} GPUs of a worker are of one machine, since its ranks talk over that "
        "machine's sockets: several machines serve as several workers"
    )


def _without_place(
    pools: Iterable[PoolSettings], machines: Sequence[Machine]
) -> Iterator[tuple[str, str]]:
    """Pools whose workers do not all find a place when those are placed first that the fewest
    machines suit, and of them the most demanding."""
    free = [dict(machine.offers) for machine in machines]

    def freedom(pool: PoolSettings) -> tuple[int, float]:
        suiting = sum(not machine.lacks(pool) for machine in machines)
        return suiting, -sum(worker_demand(pool).values())

    for pool in sorted(pools, key=freedom):
        demand, placed = worker_demand(pool), 0
        for machine, offers in zip(machines, free, strict=True):
            if machine.lacks(pool):
                continue
            while placed < pool.least and all(
                offers.get(name, 0) >= wanted - _ROUNDING for name, wanted in demand.items()
            ):
                placed += 1
                for name, wanted in demand.items():
                    offers[name] -= wanted
        if placed < pool.least:
            room = f"room for {placed} of {pool.least} workers beside the others"
            yield pool.name, f"pool {pool.name}: {room}: lower its number, or add machines"

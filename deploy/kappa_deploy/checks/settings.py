"""Settings that are sound one by one and do not go together. Pure.

Checked after the command line's options have been applied; all faults are reported at once.
"""

from __future__ import annotations

from collections.abc import Iterator

from kappa.settings.cluster import ClusterSettings
from kappa.settings.routing import FETCHING_POLICY
from kappa_deploy.app.plan import ranks_of
from kappa_deploy.checks.facts import Facts, Worker
from kappa_deploy.checks.findings import Finding


def model_folders(facts: Facts) -> Iterator[Finding]:
    """Folders of models that cannot be read."""
    yield from (Finding("fail", fault) for fault in facts.model_faults)


def settings_together(facts: Facts) -> Iterator[Finding]:
    """Contradictions between sections, and of each pool with the sections."""
    yield from (Finding("fail", fault) for fault in contradictions(facts.settings))


def contradictions(settings: ClusterSettings) -> list[str]:
    """Contradictions, each a sentence with what to change."""
    found: list[str] = []
    for of_one in settings.by_model():
        found += _of_pools_together(of_one)
        workers = [Worker(of_one, pool) for pool in of_one.all_pools]
        found += (fault for check in _OF_A_POOL for each in workers for fault in check(each))
    return list(dict.fromkeys(found))


def _of_pools_together(settings: ClusterSettings) -> Iterator[str]:
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
    if kind == "vllm" and len({bool(pool.placement.gpus) for pool in pools}) > 1 and chosen:
        yield (
            "some pools are on GPUs, where vLLM chooses missing settings, and some on CPUs, and "
            f"none could use another's blocks: give engine.{' and engine.'.join(chosen)}"
        )
    on_gpus = ", ".join(pool.name for pool in pools if pool.paced and pool.placement.gpus)
    if on_gpus:
        yield f"pools {on_gpus} have GPUs and are paced: a GPU has its own speed; drop one"


def _ranks(w: Worker) -> Iterator[str]:
    if w.tier == "lmcache" and not w.engine.block_tokens:
        yield (
            f"pool {w.pool.name}: host_tier lmcache must know the size of blocks, which vLLM is "
            "to choose: give engine.block_tokens"
        )
    tp, stages = ranks_of(w.engine, w.gpus)
    if w.kind == "vllm" and tp * stages != max(w.gpus, 1):
        yield (
            f"pool {w.pool.name}: engine.extra divides a worker among {tp * stages} ranks "
            f"(tensor_parallel_size {tp}, pipeline_parallel_size {stages}), and its "
            f"placement.gpus is {w.gpus}: give as many"
        )
    if w.kind == "torch" and w.gpus > 1:
        yield (
            f"pool {w.pool.name}: engine.kind torch runs on one GPU, and placement.gpus is "
            f"{w.gpus}: give 1, and more replicas"
        )


def _stock_tier(w: Worker) -> Iterator[str]:
    """What a stock engine cannot do: nothing of ours runs in it."""
    if w.tier != "stock":
        return
    asks = f"pool {w.pool.name}: engine.host_tier stock leaves the engine as vLLM makes it"
    if w.settings.scheduler.name != "stock":
        yield f"{asks}, and scheduler.name is {w.settings.scheduler.name}: say stock, too"
    if w.pool.paced:
        yield f"{asks}, which cannot be paced: say 'paced: false'"
    if w.pool.role != "both":
        yield f"{asks}, which hands nothing over, and the pool's role is {w.pool.role}: say both"
    if w.engine.host_bytes != 0 and not w.gpus:
        yield f"{asks}: its copies need a GPU, and placement.gpus is 0: say host_bytes: 0"


def _host_tier(w: Worker) -> Iterator[str]:
    engine, gpus, tier, link = w.engine, w.gpus, w.tier, w.settings.scheduler
    where = f"pool {w.pool.name}: engine."
    if engine.kind != "vllm" or engine.host_bytes == 0:
        return
    if engine.disk_bytes and gpus:
        yield (
            f"{where}disk_bytes is {engine.disk_bytes:,} and placement.gpus {gpus}: ours copies "
            "between tensors of a CPU, and vLLM's own tiering (0.29) never removes a file, so "
            "no size holds it; leave disk_bytes and disk_dir out for pools with GPUs"
        )
    if engine.disk_bytes and link.link_order == "fifo":
        yield (
            f"{where}disk_bytes needs scheduler.link_order loads_first, and it is fifo, which is "
            "vLLM's own order and knows no disk"
        )
    if engine.disk_bytes and w.pool.paced:
        yield f"{where}disk_bytes is a real disk, and the pool is paced: leave it out there"
    if tier == "own" and gpus:
        yield (
            f"{where}host_tier own copies between tensors of a CPU and cannot reach a GPU's: say "
            "auto or native, with which vLLM copies"
        )
    if engine.load == "layers" and (gpus or link.name == "stock"):
        yield (
            f"{where}load layers is of host_tier own, on CPUs, under a scheduling rule of ours, "
            f"and placement.gpus is {gpus}, scheduler.name {link.name}: say ahead"
        )
    if tier == "native" and not gpus:
        yield f"{where}host_tier native needs a GPU, and placement.gpus is 0: say auto or own"
    if tier == "native" and link.duplex == "half":
        yield (
            f"{where}host_tier native copies each way in a stream of its own, and "
            "scheduler.duplex is half: say full"
        )


def _hands_over(settings: ClusterSettings) -> bool:
    return any(pool.role != "both" for pool in settings.all_pools)


def _reads_peers(w: Worker) -> Iterator[str]:
    """What keeps workers from reading each other's host tiers, where they are to."""
    if w.settings.router.policy == FETCHING_POLICY:
        asks, remedy = f"router.policy {FETCHING_POLICY}", "name policy priced"
    elif _hands_over(w.settings) and w.settings.transfer.connector == "peers":
        asks, remedy = "transfer.connector peers", "make every pool's role both"
    else:
        return
    reading = f"{asks} has workers read each other's host tiers"
    if w.kind != "vllm":
        yield f"{reading}, and engine.kind is {w.kind}, which cannot: {remedy}"
    elif w.tier not in ("own", "native") or w.engine.host_bytes == 0:
        has = f"host tier is {w.tier}" if w.engine.host_bytes != 0 else "engine.host_bytes is 0"
        yield (
            f"{reading}, which host_tier auto can, and pool {w.pool.name}'s {has}: {remedy}, or "
            "change the pool"
        )
    elif w.engine.disk_bytes:
        yield (
            f"{asks} has workers read host memory alone, and pool {w.pool.name} has "
            f"engine.disk_bytes: leave it out, or {remedy}"
        )
    elif w.settings.scheduler.link_order == "fifo":
        yield (
            f"{asks} needs scheduler.link_order loads_first, and it is fifo, which is vLLM's "
            "own manager of host memory"
        )


def _hands_over_by_nixl(w: Worker) -> Iterator[str]:
    if w.settings.transfer.connector != "nixl" or not _hands_over(w.settings):
        return
    if w.kind != "vllm":
        yield f"engine.kind is {w.kind}, which cannot hand KV over: make every pool's role both"
        return
    who = f"pool {w.pool.name}"
    if w.engine.host_bytes == 0:
        yield f"{who} hands KV over or takes it, which needs engine.host_bytes above 0"
    if not w.gpus:
        yield (
            f"{who} has no GPU, and transfer.connector is nixl, which vLLM's CPU build lacks: "
            "say peers"
        )


def _adapters(w: Worker) -> Iterator[str]:
    if not w.settings.model.adapters:
        return
    who = f"model {w.settings.model.id} has adapters, which"
    if w.kind != "vllm":
        yield f"{who} engine.kind {w.kind} does not serve: say vllm"
    if w.tier == "lmcache":
        yield (
            f"{who} LMCache's keys do not know (KV of one would be taken for another's): pool "
            f"{w.pool.name} needs another engine.host_tier"
        )


_OF_A_POOL = (_ranks, _stock_tier, _host_tier, _reads_peers, _hands_over_by_nixl, _adapters)

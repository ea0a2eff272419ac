"""Settings that are sound one by one and do not go together: all of them at once. Pure.

Looked at before anything starts, and after the command line's options have been applied.
"""

from __future__ import annotations

from collections.abc import Iterator

from kappa.settings.cluster import ClusterSettings
from kappa.settings.pools import PoolSettings


def contradictions(settings: ClusterSettings) -> list[str]:
    """Every one of them, empty if there is none."""
    return [*_of_engines(settings), *_of_roles(settings)]


def _of_engines(settings: ClusterSettings) -> Iterator[str]:
    kind = settings.engine.kind
    paced, unpaced = _names(settings, paced=True), _names(settings, paced=False)
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
    on_gpus = ", ".join(p.name for p in settings.all_pools if p.paced and p.placement.gpus)
    if on_gpus:
        yield f"pools {on_gpus} have GPUs and are paced: a GPU has its own speed; drop one"


def _of_roles(settings: ClusterSettings) -> Iterator[str]:
    pools = settings.all_pools
    if all(pool.role == "both" for pool in pools):
        return
    if settings.engine.kind != "vllm":
        yield (
            f"engine.kind is {settings.engine.kind}, which cannot hand KV over: make every pool's "
            "role both"
        )
        return
    for pool in pools:
        yield from _of_role(settings, pool)


def _of_role(settings: ClusterSettings, pool: PoolSettings) -> Iterator[str]:
    engine = pool.engine_settings(settings.engine)
    if not engine.host_bytes:
        yield f"pool {pool.name} hands KV over or takes it, which needs engine.host_bytes above 0"
    if engine.host_tier != "own" and settings.transfer.connector == "files":
        yield (
            f"pool {pool.name}: transfer.connector files needs engine.host_tier own, not "
            f"{engine.host_tier}"
        )
    if settings.transfer.connector == "nixl" and not pool.placement.gpus:
        yield (
            f"pool {pool.name} has no GPU, and transfer.connector is nixl, which vLLM's CPU build "
            "lacks: say files"
        )


def _names(settings: ClusterSettings, *, paced: bool) -> str:
    return ", ".join(pool.name for pool in settings.all_pools if pool.paced == paced)

"""What the bench of sparse decoding measures, by name: models, contexts, and the machine.

`clo-cpu*` run anywhere; in `clo-cpu-paced` the link is emulated, copies taking as long as on a link
of that bandwidth, asleep. The others have the shapes of paper 004 (Fig. 10, within 48 GB of device
memory) and need a GPU. Weights, keys and values are no trained model's, so hit rates are injected.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kappa.plan.clo import CloConfig

GIB = 1 << 30
PAPER_HITS = 0.79
"""Mean hit rate that paper 004 reports (79.2 %); its range is 0.65 to 0.90."""


@dataclass(frozen=True, slots=True)
class SparseCell:
    """`batch` sequences of `context` tokens each that decode. hits: rates that are injected."""

    batch: int
    context: int
    hits: tuple[float, ...] = (PAPER_HITS,)

    @property
    def name(self) -> str:
        """As `--only` finds it: 4x8192."""
        return f"{self.batch}x{self.context}"


@dataclass(frozen=True, slots=True)
class SparseSetting:
    """Cells of one model. link_bytes_per_s: of an emulated link; 0: the machine's own. cap_bytes:
    device memory that may be used; 0: all. threads: that compute on a CPU; 0: as torch decides.
    lru: whether the LRU block cache is measured beside it."""

    name: str
    device: str
    dtype: str
    model: str
    cells: tuple[SparseCell, ...]
    clo: CloConfig = field(default_factory=CloConfig)
    block_tokens: int = 16
    link_bytes_per_s: float = 0.0
    cap_bytes: int = 0
    threads: int = 0
    steps: int = 16


_SWEEP = (0.65, PAPER_HITS, 0.9)
_CPU_CELLS = (SparseCell(1, 4096, _SWEEP), SparseCell(4, 2048, _SWEEP))
_MEAN = (PAPER_HITS,)
_BATCHES = tuple(
    SparseCell(batch, 8192, _SWEEP if batch == 16 else _MEAN) for batch in (4, 8, 16, 32, 64)
)
_LONG = tuple(SparseCell(1, thousands * 1024) for thousands in (32, 64, 128, 256))


def _gpu(name: str, model: str, cells: tuple[SparseCell, ...], epsilon: float) -> SparseSetting:
    return SparseSetting(
        name, "cuda", "float16", model, cells, CloConfig(epsilon=epsilon), cap_bytes=48 * GIB
    )


SPARSE_SETTINGS: dict[str, SparseSetting] = {
    one.name: one
    for one in (
        SparseSetting(
            "clo-cpu-smallest", "cpu", "float32", "llama-tiny", (SparseCell(2, 256),),
            CloConfig(recent_tokens=16), block_tokens=8, link_bytes_per_s=20e6, threads=1, steps=4,
        ),
        SparseSetting("clo-cpu", "cpu", "float32", "llama-small", _CPU_CELLS, threads=1),
        SparseSetting(
            "clo-cpu-paced", "cpu", "float32", "llama-small", _CPU_CELLS, link_bytes_per_s=100e6,
            threads=1,
        ),
        _gpu("clo-llama-8k", "llama-3-8b", _BATCHES, 0.1),
        _gpu("clo-llama-long", "llama-3-8b", (*_LONG, SparseCell(1, 512 * 1024)), 0.1),
        _gpu("clo-qwen-8k", "qwen-2.5-14b", _BATCHES[:3], 0.05),
        _gpu("clo-qwen-long", "qwen-2.5-14b", _LONG[:3], 0.05),
    )
}  # fmt: skip


def sparse_setting(name: str) -> SparseSetting:
    """The setting of that name.

    Raises:
        ValueError: there is none; says which there are.
    """
    if name not in SPARSE_SETTINGS:
        raise ValueError(f"no setting named {name!r}: use some of {', '.join(SPARSE_SETTINGS)}")
    return SPARSE_SETTINGS[name]

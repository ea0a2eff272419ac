"""What is measured, by name: models, cells and the machine that they are for.

A cell is one point of an experiment: a batch of sequences that decodes behind a prompt, or a prompt
whose first part is cached. `cpu-*` run anywhere; the others are the shapes of papers 000 and 003
and need a GPU. In `cpu-paced*` the link is emulated: copies take as long as on a link of the given
bandwidth, asleep, so that they leave the processor to the computation, as a GPU's copies do.
`clo-*` decode with a sparse choice of the cache (paper 004, Fig. 10, within 48 GB of device
memory): weights, keys and values are no trained model's, so hit rates are injected.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.forward import Order
from engine.profiling import ProfileSettings
from kappa.plans.clo import CloConfig

GIB = 1 << 30
PAPER_HITS = 0.79
"""Mean hit rate that paper 004 reports (79.2 %); its range is 0.65 to 0.90."""


@dataclass(frozen=True, slots=True)
class DecodeCell:
    """Sequences of one length that decode `gen` tokens, in `batches` of `batch` sequences.

    order: "row", a batch through all layers, or "column", a layer serves all batches. policies: as
    `benchmarks.offload.policies` names them; the first is the baseline.
    """

    batch: int
    prompt: int
    gen: int
    policies: tuple[str, ...]
    batches: int = 1
    order: Order = "row"

    @property
    def sequences(self) -> int:
        """Of all batches."""
        return self.batch * self.batches

    @property
    def name(self) -> str:
        """As `--only` finds it: 64x128/32, or 8*32x128/32."""
        times = f"{self.batches}*" if self.batches > 1 else ""
        return f"{times}{self.batch}x{self.prompt}/{self.gen}"


@dataclass(frozen=True, slots=True)
class PrefixCell:
    """A prompt of `cached` tokens in host memory and `new` ones to compute: time to first token.

    sweep: shares of the cached tokens, recomputed at the front and taken from activations, that are
    tried beside the planners' choices.
    """

    cached: int
    new: int
    sweep: tuple[float, ...] = (0.125, 0.25, 0.5, 0.75)

    @property
    def name(self) -> str:
        """As `--only` finds it: 4096+128."""
        return f"{self.cached}+{self.new}"


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


Cell = DecodeCell | PrefixCell


@dataclass(frozen=True, slots=True)
class Group:
    """Cells of one model with its weights in one place.

    cpu_threads: that may attend to KV in host memory; with 0 the policies "cpu-*" are refused.
    sparse: cells of sparse decoding, which have a rig each, and arms and rows of their own.
    """

    model: str
    cells: tuple[Cell, ...]
    streamed: bool = False
    cpu_threads: int = 0
    sparse: tuple[SparseCell, ...] = ()


@dataclass(frozen=True, slots=True)
class Setting:
    """Groups of cells for one kind of machine.

    link_bytes_per_s: of an emulated link; 0: the machine's own. cap_bytes: device memory that may
    be used; 0: all of it. threads: that compute on a CPU, besides the link's; 0: as torch decides.
    profile: how the rates are measured. clo, steps: of sparse decoding, what is chosen, and for how
    many steps.
    """

    name: str
    device: str
    dtype: str
    groups: tuple[Group, ...]
    block_tokens: int = 16
    link_bytes_per_s: float = 0.0
    cap_bytes: int = 0
    threads: int = 0
    profile: ProfileSettings = field(default_factory=ProfileSettings)
    clo: CloConfig = field(default_factory=CloConfig)
    steps: int = 16

    @property
    def is_sparse(self) -> bool:
        """Whether its cells are of sparse decoding."""
        return any(group.sparse for group in self.groups)

    @property
    def link(self) -> str:
        """As rows name it."""
        pace = self.link_bytes_per_s
        return f"emulated, {pace / 1e9:g} GB/s" if pace else "own"


_SLOW_BYTES_PER_S = 200e6
_SHARES = ("share-25", "share-50", "share-75")
_KVPR = ("kv-only", "kvpr-paper", "kvpr-ahead", "activations")
_COLUMN = ("kv-only", "hybrid-paper", "hybrid-corrected", "hybrid-planned", "activations")
_SWEPT = ("hybrid-25", "hybrid-50", "hybrid-75")
_SMALL = ProfileSettings(
    tokens=(128, 256, 512, 768, 1024, 1536), new_tokens=(1, 8, 32, 128, 384),
    context_tokens=(0, 256, 1024), decode_sequences=(1, 4, 8, 16),
    decode_tokens=(0, 512, 2048, 4096), repeats=15,
)  # fmt: skip
_TINY = ProfileSettings(
    tokens=(32, 64, 96, 128), new_tokens=(1, 8, 32), context_tokens=(0, 64),
    decode_sequences=(1, 4), decode_tokens=(0, 64, 256), repeats=5,
)  # fmt: skip


def _cpu(name: str, link_bytes_per_s: float) -> Setting:
    """Small shapes; with a slow link fewer bytes, so that it takes as long."""
    paced = 0 < link_bytes_per_s < _SLOW_BYTES_PER_S
    batch, prompt, gen = (4, 128, 9) if paced else (8, 256, 17)
    row = DecodeCell(batch, prompt, gen, (*_KVPR, *_SHARES, "device"))
    # As much KV as weights, or more: what paper 003 is about.
    column = DecodeCell(
        4, prompt, 5 if paced else 17, (*_COLUMN, *_SWEPT), batches=3 if paced else 4,
        order="column",
    )  # fmt: skip
    prefix = PrefixCell(1024, 32)
    groups = (
        Group("opt-small", (row, prefix)),
        Group("opt-small", (column,), streamed=True),
        Group("llama-small", (prefix,)),
    )
    return Setting(
        name, "cpu", "float32", groups, link_bytes_per_s=link_bytes_per_s, threads=1,
        profile=_SMALL,
    )  # fmt: skip


def _kvpr(model: str) -> Setting:
    """Table 3 and 4, Fig. 6 of paper 000: latency, weights on the device."""
    cells = tuple(
        DecodeCell(
            64, prompt, gen,
            (*_KVPR, *(_SHARES if gen == 32 else ()), "device"),
        )
        for gen in (32, 128)
        for prompt in (128, 256, 512)
    )  # fmt: skip
    return Setting(f"kvpr-{model.removeprefix('opt-')}", "cuda", "float16", (Group(model, cells),))


def _kvpr_weights() -> Setting:
    """Fig. 7 of paper 000: throughput, 8 batches of 32, weights streamed."""
    policies = ("kv-only", "kvpr-column", "activations")
    cells = tuple(
        DecodeCell(32, prompt, 32, policies, batches=batches, order="column")
        for prompt, batches in ((256, 8), (512, 4), (1024, 2))
    )
    groups = tuple(Group(model, cells, streamed=True) for model in ("opt-6.7b", "opt-30b-8-layers"))
    # Of 13B, what host memory of 128 GiB holds beside the weights, KV and activations both.
    fewer = tuple(
        DecodeCell(32, prompt, 32, policies, batches=batches, order="column")
        for prompt, batches in ((256, 4), (512, 2))
    )
    groups += (Group("opt-13b", fewer, streamed=True),)
    return Setting("kvpr-weights", "cuda", "float16", groups)


def _hybrid() -> Setting:
    """Fig. 12 to 15 of paper 003, within 24 GB of device memory, weights streamed."""
    cells = (
        DecodeCell(64, 128, 128, _COLUMN, batches=2, order="column"),
        DecodeCell(32, 512, 128, _COLUMN, batches=2, order="column"),
        DecodeCell(64, 256, 16, (*_COLUMN, *_SWEPT), batches=2, order="column"),
    )
    return Setting(
        "hybrid-13b", "cuda", "float16", (Group("opt-13b", cells, streamed=True),),
        cap_bytes=24 * GIB,
    )  # fmt: skip


def _ttft() -> Setting:
    groups = (
        Group("llama-3-8b", (PrefixCell(8_192, 128), PrefixCell(32_768, 128))),
        Group("opt-6.7b-long", (PrefixCell(2_048, 128), PrefixCell(8_192, 128))),
    )
    return Setting("ttft", "cuda", "bfloat16", groups)


_CPU_SHARES = ("cpu-25", "cpu-50", "cpu-75", "cpu-100", "cpu-paper", "cpu-ahead")


def _cpu_offload(name: str, link_bytes_per_s: float) -> Setting:
    """The context split of paper 002, weights on the device."""
    split = DecodeCell(8, 512, 17, ("kv-only", *_CPU_SHARES, "device"))
    groups = (
        Group("opt-small", (split,), cpu_threads=1),
        Group("llama-small", (split,), cpu_threads=1),
    )
    return Setting(
        name, "cpu", "float32", groups, link_bytes_per_s=link_bytes_per_s, threads=1,
        profile=_SMALL,
    )  # fmt: skip


def _cpu_kv(threads: int) -> Setting:
    """KV alone in host memory: c swept, for so many threads of the CPU."""
    policies = ("kv-only", *_CPU_SHARES, "device")
    groups = (
        Group(
            "llama-3-8b",
            (DecodeCell(8, 4_096, 17, policies), DecodeCell(1, 32_768, 17, policies)),
            cpu_threads=threads,
        ),
        Group("opt-6.7b", (DecodeCell(16, 1_024, 17, policies),), cpu_threads=threads),
    )
    return Setting(f"cpu-kv-{threads}", "cuda", "bfloat16", groups)


_SMALLEST_OFFLOAD = Setting(
    "cpu-offload-smallest", "cpu", "float32",
    (
        Group("opt-tiny", (DecodeCell(2, 24, 4, ("kv-only", "cpu-50", "cpu-ahead")),),
              cpu_threads=1),
    ),
    block_tokens=8, link_bytes_per_s=40e6, threads=1, profile=_TINY,
)  # fmt: skip
_SMALLEST = Setting(
    "cpu-smallest", "cpu", "float32",
    (
        Group("opt-tiny", (
            DecodeCell(2, 24, 4, ("kv-only", "kvpr-ahead")), PrefixCell(64, 8, ()),
        )),
        Group("opt-tiny", (
            DecodeCell(2, 24, 4, ("kv-only", "hybrid-planned"), batches=2, order="column"),
        ), streamed=True),
    ),
    block_tokens=8, link_bytes_per_s=40e6, threads=1, profile=_TINY,
)  # fmt: skip
_HIT_SWEEP = (0.65, PAPER_HITS, 0.9)
_CPU_CELLS = (SparseCell(1, 4096, _HIT_SWEEP), SparseCell(4, 2048, _HIT_SWEEP))
_MEAN = (PAPER_HITS,)
_BATCHES = tuple(
    SparseCell(batch, 8192, _HIT_SWEEP if batch == 16 else _MEAN) for batch in (4, 8, 16, 32, 64)
)
_LONG = tuple(SparseCell(1, thousands * 1024) for thousands in (32, 64, 128, 256))


def _sparse_gpu(name: str, model: str, cells: tuple[SparseCell, ...], epsilon: float) -> Setting:
    return Setting(
        name, "cuda", "float16", (Group(model, (), sparse=cells),), cap_bytes=48 * GIB,
        clo=CloConfig(epsilon=epsilon),
    )  # fmt: skip


def _sparse_cpu(name: str, link_bytes_per_s: float) -> Setting:
    groups = (Group("llama-small", (), sparse=_CPU_CELLS),)
    return Setting(name, "cpu", "float32", groups, link_bytes_per_s=link_bytes_per_s, threads=1)


_SMALLEST_SPARSE = Setting(
    "clo-cpu-smallest", "cpu", "float32", (Group("llama-tiny", (), sparse=(SparseCell(2, 256),)),),
    block_tokens=8, link_bytes_per_s=20e6, threads=1, clo=CloConfig(recent_tokens=16), steps=4,
)  # fmt: skip
SETTINGS: dict[str, Setting] = {
    setting.name: setting
    for setting in (
        _cpu("cpu-small", 0.0), _cpu("cpu-paced", 80e6), _cpu("cpu-paced-fast", 600e6), _SMALLEST,
        _cpu_offload("cpu-offload-small", 0.0), _cpu_offload("cpu-offload-paced", 600e6),
        _SMALLEST_OFFLOAD,
        _kvpr("opt-6.7b"), _kvpr("opt-13b"), _kvpr_weights(), _hybrid(), _ttft(),
        *(_cpu_kv(threads) for threads in (1, 4, 8, 15)),
        _SMALLEST_SPARSE, _sparse_cpu("clo-cpu", 0.0), _sparse_cpu("clo-cpu-paced", 100e6),
        _sparse_gpu("clo-llama-8k", "llama-3-8b", _BATCHES, 0.1),
        _sparse_gpu("clo-llama-long", "llama-3-8b", (*_LONG, SparseCell(1, 512 * 1024)), 0.1),
        _sparse_gpu("clo-qwen-8k", "qwen-2.5-14b", _BATCHES[:3], 0.05),
        _sparse_gpu("clo-qwen-long", "qwen-2.5-14b", _LONG[:3], 0.05),
    )
}  # fmt: skip


def setting(name: str) -> Setting:
    """The setting of that name.

    Raises:
        ValueError: there is none; says which there are.
    """
    if name not in SETTINGS:
        raise ValueError(f"no setting named {name!r}: use some of {', '.join(SETTINGS)}")
    return SETTINGS[name]

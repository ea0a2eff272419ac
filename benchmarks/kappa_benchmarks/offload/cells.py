"""The settings of `kappa bench offload` by name: models, cells, and the emulated link.

A cell is one point of an experiment: requests that decode behind prompts (papers 000, 002, 003),
with room in host memory for all or for some; a prompt with a cached prefix (paper 001); or sparse
decoding (paper 004). In `*-paced` settings the link is emulated: copies take as long as on a
link of the given bandwidth, asleep, so that they leave the processor to the computation, as a GPU's
copies do. Weights are random, from a seed, but for those of a trained model, which sparse decoding
needs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kappa.plans.clo import CloConfig
from kappa.settings.cluster import home
from kappa_deploy.app.smollm2 import folder_of
from kappa_engine.config import ModelConfig, read_config
from kappa_engine.kv_cache import ArenaSize
from kappa_engine.profile import ProfileSettings

TEXT = Path(__file__).parents[3] / "docs" / "adr"
"""The text that a trained model reads: this project's decisions, all of 2026."""
SMOLLM2 = "smollm2-135m"
HEADS = TEXT.parent / "results" / "2026-11-29-heads-smollm2-135m.json"
"""What `kappa heads smollm2-135m` wrote."""


@dataclass(frozen=True, slots=True)
class DecodeCell:
    """Requests of one length that the served engine decodes."""

    # 0: in each way as many as host memory holds; then tokens per second are compared.
    requests: int
    # Tokens of each prompt, and of each answer.
    prompt: int
    gen: int
    # As `kappa_benchmarks.offload.policies` names them; the first is the baseline.
    policies: tuple[str, ...]
    # Contexts that host memory has room for as KV, while all requests come at once; 0: all.
    held: int = 0

    @property
    def system(self) -> str:
        return "decode" if self.decodes_alone else "capacity"

    @property
    def decodes_alone(self) -> bool:
        """Whether all run at once, and the prompts are timed apart."""
        return not (self.held and self.requests)

    @property
    def name(self) -> str:
        """As `--only` finds it: 64x128/32, 64x128/32 in 8, or allx128/32 in 8."""
        held = f" in {self.held}" * bool(self.held)
        return f"{self.requests or 'all'}x{self.prompt}/{self.gen}{held}"


@dataclass(frozen=True, slots=True)
class PrefixCell:
    """A prompt with a prefix in host memory: time to first token."""

    # Tokens in host memory, and to compute.
    cached: int
    new: int
    # Shares of the cached tokens, recomputed at the front or taken from activations, that are tried
    # beside the planners' choices.
    sweep: tuple[float, ...] = (0.125, 0.25, 0.5, 0.75)
    system = "prefix-ttft"

    @property
    def name(self) -> str:
        """As `--only` finds it: 4096+128."""
        return f"{self.cached}+{self.new}"


@dataclass(frozen=True, slots=True)
class SparseCell:
    """Texts that a model reads on sparsely."""

    texts: int
    # Tokens of each that are computed exactly, and tokens that are then read one by one.
    context: int
    steps: int = 17
    # Of the context that is chosen.
    shares: tuple[float, ...] = (1 / 8,)
    # Where numbers are hidden, each in a context of its own: then the cell measures answers, and
    # without them seconds.
    depths: tuple[float, ...] = ()
    # As `kappa_benchmarks.offload.sparse` names them.
    ways: tuple[str, ...] = ("clo", "lru")

    @property
    def system(self) -> str:
        return "sparse-answers" if self.depths else "sparse-seconds"

    @property
    def name(self) -> str:
        """As `--only` finds it: 4x8192."""
        return f"{self.texts}x{self.context}"


Cell = DecodeCell | PrefixCell | SparseCell


@dataclass(frozen=True, slots=True)
class Group:
    """Cells of one model."""

    model: str
    cells: tuple[Cell, ...]
    # That may attend to KV in host memory.
    cpu_threads: int = 0
    # Of the layers, with weights in host memory.
    weights: float = 0.0


_SMALL = ProfileSettings(
    tokens=(128, 256, 512, 768, 1024, 1536), new_tokens=(1, 8, 32, 128, 384),
    context_tokens=(0, 256, 1024), decode_sequences=(1, 4, 8, 16),
    decode_tokens=(0, 512, 2048, 4096), repeats=15,
)  # fmt: skip
# For decoding alone.
_DECODING = ProfileSettings(
    tokens=(128, 256, 512, 1024), new_tokens=(1, 32, 256), context_tokens=(0, 256),
    decode_sequences=(4, 16, 32), decode_tokens=(0, 1024, 2048, 4096), repeats=9,
)  # fmt: skip
_TINY = ProfileSettings(
    tokens=(32, 64, 96, 128), new_tokens=(1, 8, 32), context_tokens=(0, 64),
    decode_sequences=(1, 4), decode_tokens=(0, 64, 256), repeats=5,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Setting:
    """Groups of cells on a CPU with one computing thread, or on a GPU."""

    name: str
    groups: tuple[Group, ...]
    # Of an emulated link; 0: the machine's own.
    link_bytes_per_s: float = 0.0
    # Of an emulated link that is as fast as this needs: a token's seconds to project keys and
    # values, as measured in a step of the first cell, over its seconds to load them.
    psi_over_mu: float = 0.0
    block_tokens: int = 16
    # Sizes by which the rates are measured.
    profile: ProfileSettings = _SMALL
    # Settings of sparse decoding, but for the share.
    clo: CloConfig = field(default_factory=CloConfig)
    # "cpu", or "cuda", where the link is never emulated.
    device: str = "cpu"
    dtype: str = "float32"

    @property
    def link(self) -> str:
        """The link's name in rows."""
        pace = self.link_bytes_per_s
        return f"emulated, {pace / 1e9:g} GB/s" if pace else "own"


_SHARES = ("share-25", "share-50", "share-75")
_KVPR = ("host-kv", "kvpr-paper", "host-kvpr", *_SHARES, "share-100", "device")
_HYBRID = ("host-kv", "host-hybrid", "hybrid-paper", "hybrid-50", "hybrid-75", "hybrid-100")
_ALLOCATED = ("host-hybrid", "hybrid-50", "hybrid-75", "hybrid-100")
_CPU = ("host-kv", "cpu-25", "cpu-50", "cpu-75", "cpu-100", "cpu-paper", "cpu-ahead", "device")


def _plans(name: str, link_bytes_per_s: float, *, short: bool = False) -> Setting:
    """Papers 000, 001 and 003. short: fewer bytes, for a slow link."""
    batch, prompt, gen = (4, 128, 9) if short else (8, 256, 17)
    # Three times what host memory has room for as KV: what paper 003 is about.
    held = DecodeCell(3 * batch, prompt, gen, _HYBRID, held=batch)
    prefix = PrefixCell(1024, 32)
    groups = (
        Group("opt-small", (DecodeCell(batch, prompt, gen, _KVPR), prefix)),
        Group("opt-small", (held,)),
        Group("llama-small", (prefix,)),
    )
    return Setting(name, groups, link_bytes_per_s)


def _on_cpu(name: str, link_bytes_per_s: float) -> Setting:
    """Paper 002: the CPU attends to a part of each context, weights on the device."""
    cells = (DecodeCell(8, 512, 17, _CPU),)
    groups = tuple(Group(model, cells, cpu_threads=1) for model in ("opt-small", "llama-small"))
    return Setting(name, groups, link_bytes_per_s)


def _mixed(name: str, psi_over_mu: float, *cells: DecodeCell, weights: float = 0.0) -> Setting:
    """Papers 000 and 003 where link and processor are equals, so that a mixture is best."""
    groups = (Group("opt-deep", cells, weights=weights),)
    return Setting(name, groups, psi_over_mu=psi_over_mu, profile=_DECODING)


def _weights(name: str, link_bytes_per_s: float, cell: DecodeCell, cpu_threads: int = 0) -> Setting:
    """Papers 000, 002 and 003 with all weights in host memory."""
    group = Group("opt-small", (cell,), cpu_threads, weights=1.0)
    return Setting(name, (group,), link_bytes_per_s)


def _sparse(name: str, link_bytes_per_s: float) -> Setting:
    """Paper 004, its seconds."""
    return Setting(
        name, (Group(SMOLLM2, (SparseCell(2, 2_048, shares=(1 / 8, 1 / 4)),)),), link_bytes_per_s
    )


_DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
_EVERY_WAY = ("clo", "clo-waited", "clo-oracle", "clo-anew", "lru")
_SHARES_READ = (1 / 16, 1 / 8, 1 / 4, 1 / 2)
# Paper 004, what it does to answers.
_ANSWERS = Setting(
    "clo-answers",
    (Group(SMOLLM2, (SparseCell(8, 1_024, 128, _SHARES_READ, _DEPTHS),
                     SparseCell(4, 2_048, 128, (1 / 8,), _DEPTHS, _EVERY_WAY))),),
)  # fmt: skip

_CODES = ("clo", "clo-cal-128", "clo-cal")
_PARTS = ("clo-fixed", "clo-t", "clo-tg", "clo-tgp", "clo-tgp-waited")


def _by_parts(name: str, ways: tuple[str, ...], shares: tuple[float, ...] = (1 / 8,)) -> Setting:
    """Answers again, with heads as they were measured."""
    cell = SparseCell(6, 1_024, 96, shares, _DEPTHS, ways)
    return Setting(name, (Group(SMOLLM2, (cell,)),))


# Seconds beside loading everything.
_LOADING = Setting("clo-loading", (Group(SMOLLM2, tuple(
    SparseCell(1, context, 9, ways=("clo", "clo-cal-128", "clo-tgp"))
    for context in (2_048, 4_096, 8_192)
)),))  # fmt: skip

_SMALLEST = Setting(
    "smallest",
    (
        Group("opt-tiny", (DecodeCell(2, 24, 4, ("host-kv", "host-kvpr")), PrefixCell(64, 8, ()))),
        Group("opt-tiny", (DecodeCell(8, 24, 9, ("host-kv", "hybrid-100"), held=2),)),
        Group("opt-tiny", (DecodeCell(2, 33, 4, ("host-kv", "cpu-50")),), cpu_threads=1),
        Group("opt-tiny", (DecodeCell(2, 25, 4, ("host-weights", "host-kvpr")),), weights=1.0),
        Group("llama-tiny", (SparseCell(2, 256, 5), SparseCell(2, 64, 5, (0.5, 1.0), (0.5,),
                                        ("clo", "clo-fixed", "clo-tgp", "lru")))),
    ),
    40e6, block_tokens=8, profile=_TINY, clo=CloConfig(recent_tokens=16),
)  # fmt: skip

# The shapes of OPT-1.3B and of a Llama of as many parameters: a minute on a GPU, with its rates.
_GPU = Setting(
    "gpu",
    (
        Group("opt-1b", (DecodeCell(8, 512, 9, ("host-kv", "kvpr-paper", "host-kvpr", "device")),
                         PrefixCell(1_792, 128, (0.5,)))),
        Group("opt-1b", (DecodeCell(24, 512, 9, ("host-kv", "host-hybrid", "hybrid-75"), held=8),)),
        Group("llama-1b", (DecodeCell(8, 1_024, 9, ("host-kv", "cpu-25", "cpu-50", "device")),),
              cpu_threads=4),
        Group("opt-1b", (DecodeCell(8, 512, 9, ("host-weights", "host-kvpr")),), weights=1.0),
        Group("llama-1b", (SparseCell(4, 8_192),)),
    ),
    profile=ProfileSettings(), device="cuda", dtype="bfloat16",
)  # fmt: skip

SETTINGS: dict[str, Setting] = {
    one.name: one
    for one in (
        _weights("weights-kvpr", 200e6, DecodeCell(
            8, 512, 9, ("host-weights", "host-kvpr", "share-50"))),
        _mixed("mixture-kvpr", 1.0, DecodeCell(
            8, 256, 17, ("host-kv", "host-kvpr", *_SHARES, "share-100"))),
        _mixed("mixture-hybrid", 1.0, DecodeCell(0, 128, 17, ("host-kv", *_ALLOCATED), held=12)),
        _mixed("weights-hybrid", 0.9,
               DecodeCell(0, 128, 17, ("host-weights", *_ALLOCATED, "hybrid-device"), held=12),
               # What "hybrid-device" has on the device, in host memory instead.
               DecodeCell(0, 128, 17, ("host-weights", "host-hybrid", "hybrid-75"), held=15),
               weights=1.0),
        _weights("weights-cpu", 100e6, DecodeCell(2, 128, 9, ("host-weights", "host-cpu")),
                 cpu_threads=1),
        _weights("weights-cpu-large", 1e9, DecodeCell(32, 512, 9, ("host-weights", "host-cpu")),
                 cpu_threads=1),
        _plans("cpu-small", 0.0), _plans("cpu-paced", 80e6, short=True),
        _plans("cpu-paced-fast", 600e6), _on_cpu("cpu-offload-small", 0.0),
        _on_cpu("cpu-offload-paced", 600e6), _sparse("clo-cpu", 0.0),
        _sparse("clo-cpu-paced", 200e6), _ANSWERS, _LOADING,
        _by_parts("clo-codes", _CODES, (1 / 16, 1 / 8)), _by_parts("clo-parts", _PARTS),
        _SMALLEST, _GPU,
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


def _config(kind: str, layers: int, hidden: int, heads: int, vocab: int, **more: Any) -> Any:
    return {
        "model_type": kind, "num_hidden_layers": layers, "hidden_size": hidden,
        "num_attention_heads": heads, "vocab_size": vocab, "dtype": "float32", **more,
    }  # fmt: skip


_OPT = {"do_layer_norm_before": True, "activation_function": "relu"}
_LLAMA = {
    "num_key_value_heads": 2, "max_position_embeddings": 131_072, "rope_theta": 500_000.0,
    "hidden_act": "silu", "rms_norm_eps": 1e-5,
}  # fmt: skip
_MODELS = {
    "opt-small": _config("opt", 6, 256, 4, 2_000, ffn_dim=1024, max_position_embeddings=2_048,
                         word_embed_proj_dim=256, **_OPT),
    # Deeper, its MLP a quarter as wide: less of a step lies before the first overlap.
    "opt-deep": _config("opt", 18, 256, 4, 2_000, ffn_dim=256, max_position_embeddings=2_048,
                        word_embed_proj_dim=256, **_OPT),
    "opt-tiny": _config("opt", 3, 64, 4, 96, ffn_dim=256, max_position_embeddings=1_024,
                        word_embed_proj_dim=64, **_OPT),
    "llama-small": _config("llama", 6, 256, 8, 2_000, intermediate_size=768, **_LLAMA),
    "opt-1b": _config("opt", 24, 2_048, 32, 50_272, ffn_dim=8_192, max_position_embeddings=2_048,
                      word_embed_proj_dim=2_048, **_OPT),
    "llama-1b": _config("llama", 16, 2_048, 32, 32_768, intermediate_size=8_192,
                        **_LLAMA | {"num_key_value_heads": 8}),
    "llama-tiny": _config("llama", 3, 64, 4, 96, intermediate_size=96, **_LLAMA),
}  # fmt: skip


def model(name: str, dtype: str = "float32") -> ModelConfig:
    """Shapes by name: `*-small` and smaller are what a slow core can compute."""
    folder = trained_folder(name)
    return read_config(folder) if folder else read_config(model_data(name, dtype), name)


def trained_folder(name: str) -> Path | None:
    """The folder of a trained model; None: it has random weights.

    Raises:
        FileNotFoundError: it was not fetched.
    """
    if name != SMOLLM2:
        return None
    folder = folder_of(home() / "models")
    if not folder.exists():
        raise FileNotFoundError(f"{folder}: {name} is not here: `kappa serve` fetches it once")
    return folder


def model_data(name: str, dtype: str) -> dict[str, Any]:
    """A shape as a `config.json` has it."""
    return {**_MODELS[name], "dtype": dtype}


def arena_size(setting: Setting, group: Group) -> ArenaSize:
    """Blocks that hold any one prefix of the group, what its link alone copies, and a profile."""
    size, config = setting.block_tokens, model(group.model)
    kv_device = kv_host = math.ceil(setting.profile.tokens[-1] / size)
    act_device = act_host = 0
    for cell in group.cells:
        if isinstance(cell, PrefixCell):
            blocks = math.ceil((cell.cached + cell.new) / size)
            kv_device, kv_host = max(kv_device, blocks), max(kv_host, blocks)
            # With grouped queries activations are no smaller than KV: no plan uses them.
            if config.hidden < 2 * config.kv_width:
                act_host = act_device = max(act_host, blocks)
        elif isinstance(cell, DecodeCell):
            kv_host = max(kv_host, (cell.requests or cell.held) * cell.prompt // size)
            # Of plans with activations the seconds are measured, too.
            act_host = max(act_host, int(config.hidden < 2 * config.kv_width))
    return ArenaSize(kv_device, kv_host, act_device, act_host, block_tokens=size)

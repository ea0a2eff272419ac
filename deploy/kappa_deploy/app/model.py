"""The model that a cluster serves: found on disk, on the hub or the package index, or made here.

Faults that the user can mend are raised as `StartError`, as by every step of a start.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from kappa.model import ModelShape
from kappa.model_config import shape_from_config, unlisted
from kappa.settings.cluster import ClusterSettings, home
from kappa.shapes import with_stored_weights
from kappa_deploy.app import smollm2
from kappa_deploy.app.errors import PreflightError, StartError
from kappa_workers.tiny_model import make_tiny_model
from kappa_workload.sessions import demo_sessions_path, read_sessions

log = structlog.get_logger(__name__)

# What a folder's name may begin with, and a name on the hub may not.
_PLACES = ("/", ".", "~")
_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})


@dataclass(frozen=True, slots=True)
class Model:
    """A model on disk or by name."""

    # Its folder, or its name on the hub.
    source: str
    shape: ModelShape
    chat_template: str
    # The weights that its folder lacks; empty: none, or it is not a folder.
    no_weights: str = ""
    # The highest rank of its LoRA adapters; 0: it has none.
    adapter_rank: int = 0
    # Its config's `model_type`.
    family: str = ""


def prepare_model(
    settings: ClusterSettings, progress: Callable[[str], None] = lambda _: None
) -> Model:
    """Find the configured model, or make the tiny one or SmolLM2 (once; cached in `KAPPA_HOME`).

    Raises:
        StartError: it cannot be had, or not be read.
    """
    source = str(settings.model.source)
    if source == smollm2.NAME:
        smollm2.smollm2(home() / "models", progress)
    try:
        return model_here(settings) or _read(source, settings, _by_transformers(source))
    except PreflightError:
        raise
    except Exception as error:  # transformers lets through what its parts raise
        raise _unread(source, error) from None


def prepare_models(
    settings: ClusterSettings, progress: Callable[[str], None] = lambda _: None
) -> list[Model]:
    """`prepare_model` of each model that is served."""
    return [prepare_model(of_one, progress) for of_one in settings.by_model()]


def model_here(settings: ClusterSettings) -> Model | None:
    """The configured model if it can be had without a network; None: it would be fetched.

    Raises:
        PreflightError: it names a folder that is none, or that cannot be read.
    """
    source = settings.model.source
    if source is None:
        turns = (turn for s in read_sessions(demo_sessions_path()) for turn in s.turns)
        corpus = (text for turn in turns for text in (turn.input_text, turn.output_text))
        folder = home() / "models" / f"tiny-{settings.model.seed}"
        made = make_tiny_model(folder, corpus, seed=settings.model.seed)
        return _read(str(made), settings, _made_here(made))
    if source == smollm2.NAME:
        made = smollm2.folder_of(home() / "models")
        return _read(str(made), settings, _made_here(made)) if made.exists() else None
    try:
        return _read(source, settings, _by_transformers(source, is_offline=True))
    except PreflightError:
        raise
    except Exception as error:  # transformers lets through what its parts raise
        if source.startswith(_PLACES) or Path(source).exists():
            raise _unread(source, error) from None
        return None


def models_here(settings: ClusterSettings) -> Iterator[tuple[Model | None, str]]:
    """`model_here` of each model that is served, and why its folder cannot be read."""
    for of_one in settings.by_model():
        try:
            yield model_here(of_one), ""
        except StartError as error:
            yield None, str(error)


def _unread(source: str, error: Exception) -> PreflightError:
    why = f"cannot be loaded: {' '.join(str(error).split())}"
    if source.startswith(_PLACES) and not Path(source).exists():
        why = "is not there: give the model's folder on this machine, or its name on Hugging Face"
    return PreflightError(f"model.source {source!r} {why}")


def _made_here(folder: Path) -> tuple[dict[str, Any], str]:
    """Configuration and chat template of a model that we wrote, which has no gaps."""
    config, tokenizer = (
        json.loads((folder / name).read_text(encoding="utf-8"))
        for name in ("config.json", "tokenizer_config.json")
    )
    return config, tokenizer["chat_template"]


def _by_transformers(source: str, *, is_offline: bool = False) -> tuple[dict[str, Any], str]:
    """The same of any other model: its family's defaults fill gaps in its configuration. Takes four
    seconds of a core and 340 MB, torch among them."""
    from transformers import AutoConfig, AutoTokenizer, PretrainedConfig

    try:
        config = AutoConfig.from_pretrained(source, local_files_only=is_offline).to_dict()
    except Exception:  # of a family that transformers does not know, or not as it should be
        config, _ = PretrainedConfig.get_config_dict(source, local_files_only=is_offline)
    tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=is_offline)
    return config, str(tokenizer.chat_template or "")


def _read(source: str, settings: ClusterSettings, found: tuple[dict[str, Any], str]) -> Model:
    config, template = found
    pool = settings.all_pools[0]  # pools share a dtype
    engine = pool.engine_settings(settings.engine)
    dtype = engine.dtype or engine.extra.get("dtype", "auto")
    cache = engine.extra.get("kv_cache_dtype", "auto")
    weights = "fp8" if engine.extra.get("quantization") == "fp8" else dtype
    shape = shape_from_config(
        {"_name_or_path": source, **config},
        name=settings.model.id,
        kv_dtype=dtype if cache == "auto" else cache,
        weight_dtype=weights,
    )
    if note := unlisted(config):
        log.warning("model_family", source=source, note=note)
    lacking = _no_weights(Path(source))
    if Path(source).is_dir() and not lacking:
        shape = with_stored_weights(shape, Path(source))
    named = {**config, "_name_or_path": source}
    ranks = [adapter_rank(*each, named) for each in settings.model.adapters.items()]
    family = str(config.get("model_type") or "")
    return Model(source, shape, template, lacking, max(ranks, default=0), family)


def adapter_rank(name: str, folder: str, config: Mapping[str, Any]) -> int:
    """The rank of a LoRA adapter in PEFT's layout, made for a model of this configuration.

    An adapter is logged if its base has another name but layers as wide: mirrors rename models.

    Raises:
        PreflightError: it is not there, cannot be read, or was made for another model.
    """
    from safetensors import safe_open

    who = f"model.adapters: {name} in {folder}"
    try:
        facts = json.loads((Path(folder) / "adapter_config.json").read_text(encoding="utf-8"))
        rank, base = int(facts["r"]), facts.get("base_model_name_or_path")
        with safe_open(Path(folder) / "adapter_model.safetensors", "np") as file:
            # It has keys and cannot be iterated over.
            shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
    except Exception as error:  # safetensors has errors of its own
        raise PreflightError(
            f"{who} cannot be read: {error}. Give a folder with adapter_config.json and "
            "adapter_model.safetensors, as PEFT writes them"
        ) from None
    hidden = config.get("text_config", config).get("hidden_size")
    # Those that read the layer's input: A is (rank, width of its input).
    widths = {
        s[1]
        for k, s in shapes.items()
        if k.endswith(("q_proj.lora_A.weight", "v_proj.lora_A.weight"))
    }
    if hidden and widths - {hidden}:
        raise PreflightError(
            f"{who} was made for another model (it says {base}): its layers are "
            f"{', '.join(map(str, sorted(widths)))} wide, the model's {hidden}"
        )
    source = str(config.get("_name_or_path"))
    if base and Path(str(base)).name.lower() != Path(source).name.lower():
        log.warning(
            "adapter_base", adapter=name, made_for=base, model=source,
            remedy="its layers fit; if these are two models and not two names of one, its answers "
            "will be nonsense: give an adapter of this model",
        )  # fmt: skip
    return rank


def _no_weights(folder: Path) -> str:
    """The weights that a model's folder lacks; empty: none, or it is not a folder."""
    if not folder.is_dir():
        return ""
    for index in sorted(folder.glob("*.index.json")):
        named = set(json.loads(index.read_text(encoding="utf-8")).get("weight_map", {}).values())
        missing = sorted(name for name in named if not (folder / name).exists())
        if missing:
            return f"{len(missing)} of the {len(named)} files that {index.name} names: {missing[0]}"
    if not any(path.suffix in _WEIGHTS for path in folder.iterdir()):
        return f"any file of weights ({', '.join(sorted(_WEIGHTS))})"
    return ""

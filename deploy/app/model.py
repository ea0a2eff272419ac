"""The model that a cluster serves: found on disk, on the hub or the package index, or made here.

`StartError` is what every step of a start raises that the user can mend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kappa.model import ModelShape
from kappa.settings.cluster import ClusterSettings, home
from kappa.shapes import shape_from_config
from workers.tiny_model import make_tiny_model
from workload.sessions import demo_sessions_path, read_sessions


class StartError(RuntimeError):
    """The cluster could not be started; the message says why and what to do."""

    exit_code = 1


class PreflightError(StartError):
    """Found before anything was started: settings, model or machine are at fault."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Model:
    """A model on disk or by name: where it is, its shape and its chat template."""

    source: str
    shape: ModelShape
    chat_template: str


def prepare_model(
    settings: ClusterSettings, progress: Callable[[str], None] = lambda _: None
) -> Model:
    """Find the configured model, or make the tiny one or SmolLM2 (once; cached in `KAPPA_HOME`).

    Raises:
        StartError: it cannot be had, or not be read.
    """
    from deploy.app import smollm2

    source = settings.model.source
    if source == smollm2.NAME:
        source = str(smollm2.smollm2(home() / "models", progress))
    elif source is None:
        turns = (turn for s in read_sessions(demo_sessions_path()) for turn in s.turns)
        corpus = (text for turn in turns for text in (turn.input_text, turn.output_text))
        folder = home() / "models" / f"tiny-{settings.model.seed}"
        source = str(make_tiny_model(folder, corpus, seed=settings.model.seed))
    from transformers import AutoConfig, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(source).to_dict()
        template = AutoTokenizer.from_pretrained(source).chat_template or ""
    except (OSError, ValueError) as error:
        raise StartError(f"model.source {source!r} cannot be loaded: {error}") from None
    dtype = settings.engine.dtype
    shape = shape_from_config(config, name=settings.model.id, kv_dtype=dtype, weight_dtype=dtype)
    return Model(source, shape, str(template))

"""`kappa heads`: the file of head importance that sparse decoding reads, measured over text."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from kappa.plans.clo import CloConfig, HeadProfile, heads_json, thresholds
from kappa_deploy.commands.console import Json, bad_parameter, print_json, print_text
from kappa_router.console import fail, warn

if TYPE_CHECKING:
    from kappa_engine.config import ModelConfig
    from kappa_engine.weights import Weights


def heads(
    model: Annotated[str, typer.Argument(help="smollm2-135m, or a model's folder.")],
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("heads.json"),
    text: Annotated[
        Path | None, typer.Option(help="Text to measure on; default: Python's language reference.")
    ] = None,
    texts: Annotated[int, typer.Option(min=1, help="Pieces of it to measure on.")] = 6,
    tokens: Annotated[int, typer.Option(min=256, help="Of each piece.")] = 1_056,
    limit_s: Annotated[
        float, typer.Option(min=1, help="Seconds, after which the pieces done so far count.")
    ] = 1_200.0,
    json_output: Json = False,
) -> None:
    """Measure a model's heads for sparse decoding: how much each matters, and how alike its queries
    are.

    A query head matters as much as the next token's distribution changes where it sees first and
    latest tokens alone; in every other piece a number is hidden that the end repeats. The file
    goes to engine.sparse.heads.
    """
    with bad_parameter():
        if not out.parent.is_dir():
            raise ValueError(f"{out.parent} is not a folder: create it, or change --out")
        if out.is_dir():
            raise ValueError(f"{out} is a folder: name a file in it by --out")
        folder, words = _folder(model), _words(text)
        # torch: only when it is wanted.
        from kappa_engine.config import read_config
        from kappa_engine.sparse.heads import measure_heads, pieces

        clo, config = CloConfig(), read_config(folder)
        parts = list(pieces(words, _encoder(folder), texts, tokens))
        weights = _weights(folder, config)
        start_s, layers, console = time.monotonic(), weights.config.layers, Console(stderr=True)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("layers measured", total=texts * layers)

            def goes_on(done: int, layer: int) -> bool:
                bar.update(task, completed=done * layers + layer)
                return time.monotonic() - start_s < limit_s

            profile, count = measure_heads(weights, parts, clo, goes_on)
    if count < texts:
        warn(f"{count} of {texts} pieces were done in {limit_s:g} s: the others are left out")
    note = f"ablation over {count} pieces of {tokens} tokens of {text or 'pydoc_data.topics'}"
    out.write_text(heads_json(profile, model, note) + "\n", encoding="utf-8")
    facts = _facts(profile, clo, weights.config.kv_heads) | {
        "out": str(out), "pieces": count, "seconds": round(time.monotonic() - start_s, 1)
    }  # fmt: skip
    if json_output:
        print_json(facts)
        return
    print_text(
        f"Wrote {out} in {facts['seconds']} s: of {facts['kv_heads']} KV heads "
        f"{facts['refreshed']} choose again at a cosine above 0, {facts['frozen']} never; mean "
        f"cosine of neighbouring queries {facts['similarity']:.2f}."
    )


def _facts(profile: HeadProfile, clo: CloConfig, kv_heads: int) -> dict[str, Any]:
    """What the thresholds (Eq. 7-9) make of a profile."""
    tau = thresholds(profile.kv_importance(kv_heads), clo.eta, clo.power)
    assert profile.similarity is not None
    return {
        "kv_heads": tau.size, "refreshed": int((tau > 0).sum()), "frozen": int((tau <= -1).sum()),
        "similarity": float(profile.similarity.mean()),
    }  # fmt: skip


def _folder(model: str) -> Path:
    """The model's folder, fetched first if it is the one that `kappa serve` fetches."""
    from kappa.settings.cluster import home
    from kappa_deploy.app.errors import StartError
    from kappa_deploy.app.smollm2 import NAME, smollm2

    if model != NAME:
        folder = Path(model).expanduser()
        if not (folder / "config.json").is_file():
            raise ValueError(f"{model} is not here: give {NAME}, or a folder with a config.json")
        return folder
    try:
        return smollm2(home() / "models", lambda what: warn(what, "dim"))
    except StartError as error:
        fail(str(error), error.exit_code)


def _words(text: Path | None) -> str:
    if text is not None:
        return text.read_text(encoding="utf-8")
    # English prose that every Python brings.
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def _encoder(folder: Path) -> Callable[[str], list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    # What begins a text would stand within a piece, before a number that it hides.
    plain = {"add_special_tokens": False, "verbose": False}
    return lambda words: list(tokenizer(words, **plain)["input_ids"])


def _weights(folder: Path, config: ModelConfig) -> Weights:
    """A model's weights in float32, on a GPU if there is one."""
    import torch

    from kappa_engine.weights import load_weights

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return load_weights(folder, config, dtype=torch.float32, device=device)

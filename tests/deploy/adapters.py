"""LoRA adapters in PEFT's layout, made by hand: random, of the tiny model's shapes."""

import json

import numpy as np
from safetensors.numpy import save_file

RANK = 8


def make_adapter(folder, model, rank=RANK, seed=1, hidden=None):
    """An adapter of the projections of queries and values of the model in a folder."""
    config = json.loads((model / "config.json").read_text())
    width = hidden or config["hidden_size"]
    heads = {"q_proj": config["num_attention_heads"], "v_proj": config["num_key_value_heads"]}
    rng, tensors = np.random.default_rng(seed), {}
    for layer in range(config["num_hidden_layers"]):
        for name, count in heads.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            shapes = {"lora_A": (rank, width), "lora_B": (count * config["head_dim"], rank)}
            for part, shape in shapes.items():
                values = rng.standard_normal(shape).astype(np.float32)
                tensors[f"{place}.{part}.weight"] = values
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    facts = {
        "peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none",
        "target_modules": sorted(heads), "base_model_name_or_path": str(model),
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(facts))
    return folder

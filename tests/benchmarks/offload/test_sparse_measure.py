"""Measured likeness of queries: the cosines that Hugging Face's own queries have, and a file."""

import json

import numpy as np
import pytest
import torch

from benchmarks.offload import sparse_measure as command
from benchmarks.offload.sparse_measure import measure
from engine.layers import angles, frequencies, rotate
from kappa.plans.clo import HeadProfile, aggregate, read_heads
from tests.engine import hf
from tests.engine.rig import prompt, rig

STEPS = 9


def their_queries(family, tokens, config):
    """(layers, tokens, heads, head_dim) of their model, rotated."""
    model, seen = hf.reference(family), {}
    hooks = [
        layer.self_attn.q_proj.register_forward_hook(
            lambda _, args, out, i=i: seen.__setitem__(i, out[0])
        )
        for i, layer in enumerate(model.model.layers)
    ]
    try:
        hf.logits(model, tokens)
    finally:
        for hook in hooks:
            hook.remove()
    inverse, factor = frequencies(config.rope, config.head_dim)
    turn = angles(torch.arange(len(tokens)), inverse, factor, torch.float64)
    return [rotate(seen[i].view(len(tokens), config.heads, config.head_dim), *turn) for i in seen]


def test_the_mean_cosine_is_that_of_neighbouring_queries():
    rng = np.random.default_rng(2)
    heads = HeadProfile(rng.random((3, 8)))
    lengths = (30, 41)
    with rig("llama", blocks=200) as r:
        got = measure(r.forward, [prompt(n) for n in lengths], STEPS, heads).similarity
        config = r.forward.config
    wanted = []
    for length in lengths:
        answer, _ = hf.greedy(hf.reference("llama"), prompt(length), STEPS)
        tokens = np.concatenate((prompt(length), answer))
        for layer, q in enumerate(their_queries("llama", tokens, config)):
            q = q[length:].numpy()
            dots = (q[1:] * q[:-1]).sum(-1)
            norms = np.linalg.norm(q, axis=-1)
            cosine = (dots / (norms[1:] * norms[:-1])).reshape(STEPS - 1, 2, 4)
            weights = np.broadcast_to(heads.importance[layer].reshape(2, 4), cosine.shape)
            wanted.append(aggregate(cosine, weights).mean(axis=0))
    # Layers of the first prompt, then of the second.
    wanted = np.array(wanted).reshape(2, 3, 2).mean(axis=0)
    assert np.abs(got - wanted).max() < 1e-9


def test_the_command_writes_what_an_engine_reads(tmp_path, capsys):
    folder, out = hf.save(hf.reference("llama"), tmp_path / "model"), tmp_path / "heads.json"
    base = [str(folder), "--out", str(out), "--prompts", "2", "--length", "40", "--steps", "4"]
    assert command.main(base) == 0
    from engine.config import read_config

    shape = read_config(folder).shape
    first = read_heads(out, shape)
    assert first.similarity is not None and (first.importance == 1.0).all()
    scores = np.full((3, 8), 0.5).tolist()
    data = {"format": "kappa-head-importance/1", "importance": scores}
    given = tmp_path / "given.json"
    given.write_text(json.dumps(data))
    assert command.main([*base, "--importance", str(given)]) == 0
    assert (read_heads(out, shape).importance == 0.5).all()
    given.write_text(json.dumps({**data, "importance": [[0.5]]}))
    assert command.main([*base, "--importance", str(given)]) == 2
    assert "give 3 layers of 8" in capsys.readouterr().err


def test_one_step_has_no_neighbour():
    with rig("llama") as r, pytest.raises(ValueError, match="give 2 or more"):
        measure(r.forward, [prompt(9)], 1, HeadProfile(np.ones((3, 8))))

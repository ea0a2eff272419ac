"""The made checkpoint: same bytes from the same seed, and a chat template that only appends."""

import json
import subprocess
import sys

import pytest

from kappa_workers.tiny_model import BPE_TOKENS, FINGERPRINT_FILE, SPECIAL_TOKENS, make_tiny_model
from kappa_workload.sessions import as_messages, demo_sessions_path, read_sessions

TOOLS = [
    {
        "type": "function",
        "function": {"name": "run", "description": "Run it.", "parameters": {"type": "object"}},
    }
]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  What is in the folder?\n"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"type": "function", "function": {"name": "run", "arguments": {"command": "ls"}}},
            {"type": "function", "function": {"name": "run", "arguments": '{"command": "pwd"}'}},
        ],
    },
    {"role": "tool", "content": "a\nb", "tool_call_id": "1"},
    {"role": "assistant", "content": "Two files: a, b — naïve ✓"},
    {
        "role": "user",
        "content": [{"type": "text", "text": "Thanks."}, {"type": "text", "text": ""}],
    },
]


def corpus():
    turns = [turn for s in read_sessions(demo_sessions_path()) for turn in s.turns]
    return [text for turn in turns for text in (turn.input_text, turn.output_text)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", corpus())


@pytest.fixture(scope="module")
def tokenizer(model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def files(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_two_makes_give_the_same_bytes(model, tmp_path):
    again = make_tiny_model(tmp_path / "deep" / "again", corpus())

    assert files(again) == files(model)
    assert [path.name for path in again.parent.iterdir()] == ["again"]


def test_a_made_model_is_kept_and_another_seed_replaces_it(tmp_path):
    texts = ["some words to train on"]
    first = make_tiny_model(tmp_path / "m", texts)
    weights = first / "model.safetensors"
    before, made_at = files(first), weights.stat().st_mtime_ns

    assert make_tiny_model(first, iter(texts)) == first
    assert weights.stat().st_mtime_ns == made_at

    make_tiny_model(first, texts, seed=1)
    after = files(first)
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {"model.safetensors", FINGERPRINT_FILE}
    assert list(tmp_path.iterdir()) == [first]


def test_a_foreign_directory_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")

    with pytest.raises(FileExistsError, match="not replacing it"):
        make_tiny_model(tmp_path, ["words"])
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_making_it_imports_no_framework(tmp_path):
    program = (
        "import sys; from kappa_workers.tiny_model import make_tiny_model;"
        f"make_tiny_model({str(tmp_path / 'm')!r}, ['some words']);"
        "print(sorted({'torch', 'transformers', 'vllm', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_large_corpus_fills_the_vocabulary(tmp_path):
    words = [f"{left}{right}" for left in range(100, 180) for right in range(100, 180)]
    model = make_tiny_model(tmp_path / "m", [" x".join(words)])
    config = json.loads((model / "config.json").read_text())
    assert config["vocab_size"] == BPE_TOKENS + len(SPECIAL_TOKENS)


def test_the_tokenizer_is_lossless_and_no_token_is_without_text(model, tokenizer):
    config = json.loads((model / "config.json").read_text())
    assert 3000 < len(tokenizer) == config["vocab_size"] <= BPE_TOKENS + len(SPECIAL_TOKENS)
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == list(range(len(SPECIAL_TOKENS)))

    text = "  def f(x):\n\treturn 'naïve ✓ \U0001f600'\r\n"
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert len(tokenizer.encode(corpus()[0])) < len(corpus()[0]) / 2.5


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("chat", [CHAT, CHAT[1:]], ids=["system", "no system"])
def test_the_template_only_appends(tokenizer, chat, tools):
    def render(messages, **options):
        text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options)
        return text, tokenizer.encode(text, add_special_tokens=False)

    whole, whole_ids = render(chat)
    assert ("Tools:" in whole) == bool(tools)
    for k in range(1, len(chat) + 1):
        text, ids = render(chat[:k])
        assert whole.startswith(text)
        assert whole_ids[: len(ids)] == ids
        prompt, prompt_ids = render(chat[:k], add_generation_prompt=True)
        assert prompt == text + "<|assistant|>"
        assert prompt_ids[:-1] == ids
        if k < len(chat) and chat[k]["role"] == "assistant":
            assert whole.startswith(prompt)


def test_the_template_keeps_every_message(tokenizer):
    text = tokenizer.apply_chat_template(CHAT, tools=TOOLS, tokenize=False)

    assert text.startswith('<s><|system|>Tools:\n{"type": "function", "function": {"name": "run"')
    assert "<|user|>  What is in the folder?\n<|end|>" in text
    assert '<|assistant|>\n{"name": "run", "arguments": {"command": "ls"}}' in text
    assert '\n{"name": "run", "arguments": {"command": "pwd"}}<|end|><|tool|>a\nb<|end|>' in text
    assert text.endswith("<|user|>Thanks.\n<|end|>")


def test_an_unknown_role_is_refused(tokenizer):
    with pytest.raises(Exception, match="unknown role: wizard"):
        tokenizer.apply_chat_template([{"role": "wizard", "content": "?"}], tokenize=False)


def test_demo_turns_fit_and_extend_each_other_in_tokens(tokenizer):
    for session in read_sessions(demo_sessions_path()):
        before: list[int] = []
        for turn in session.turns:
            text = tokenizer.apply_chat_template(as_messages(turn), tokenize=False)
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert ids[: len(before)] == before
            before = ids
        assert len(before) < 8192


def test_tiny_model_loads_in_transformers_and_heeds_every_token(model, tokenizer):
    import torch
    from transformers import AutoModelForCausalLM

    llama = AutoModelForCausalLM.from_pretrained(model)
    assert {p.dtype for p in llama.parameters()} == {torch.float32}
    assert llama.generation_config.eos_token_id == [
        SPECIAL_TOKENS.index("</s>"),
        SPECIAL_TOKENS.index("<|end|>"),
    ]
    ids = torch.tensor([tokenizer.encode("Where is the file that was changed last week?")])
    other = ids.clone()
    other[0, 1] = ids[0, 2]
    with torch.no_grad():
        logits, changed = llama(ids).logits[0, -1], llama(other).logits[0, -1]
    assert logits.isfinite().all()
    assert (logits - changed).abs().max() > 0.05

"""A prompt's tokens equal vLLM's, and only its new text is encoded."""

from __future__ import annotations

import asyncio
import copy
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import TokenizersBackend
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.renderers import renderer_from_config
from vllm.renderers.params import ChatParams, TokenizeParams
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest, detokenizer

from kappa.incremental_tokenizer import IncrementalTokenizer
from kappa_workers import generated
from kappa_workers.tiny_model import SPECIAL_TOKENS, make_tiny_model
from kappa_workers.vllm import incremental_prompts
from kappa_workers.vllm.arguments import CPU_ENV

pytestmark = pytest.mark.vllm

MOST_TOKENS = 4096
CORPUS = ["Hello world, it's 12345.\nThe user said: \u00e9t\u00e9 \u4e2d\u6587\n"] * 9
STOCK = detokenizer.FastIncrementalDetokenizer

words = st.one_of(
    st.sampled_from([*SPECIAL_TOKENS, "<|user", "|>", "<s", "\n", "\n\n", " ", ".\nThe", "\u4e2d"]),
    st.text(max_size=12),
)
texts = st.lists(words, max_size=20).map("".join)
conversations = st.lists(
    st.tuples(st.sampled_from(["user", "assistant", "system"]), texts), min_size=1, max_size=6
)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    """vLLM's renderer of the tiny model, and its own way beside it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CPU_ENV.items():
            patch.setenv(name, value)
        model = make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", CORPUS)
        arguments = EngineArgs(str(model), max_model_len=MOST_TOKENS, dtype="float32")
        made = renderer_from_config(arguments.create_engine_config())
    made.stock = made._tokenize_prompt_async
    assert incremental_prompts.install(made)
    yield made
    detokenizer.FastIncrementalDetokenizer = STOCK


@pytest.fixture
def encoded(renderer, monkeypatch):
    """Texts that were encoded, without what was remembered."""
    seen = []
    hook = renderer._tokenize_prompt_async._tokenizer

    def encode_parts(texts):
        seen.extend(texts)
        return IncrementalTokenizer.encode_parts(hook, texts)

    monkeypatch.setattr(hook, "encode_parts", encode_parts)
    return seen


async def ids_of(renderer, text, tenant="t", params=None):
    generated.begin(tenant)
    prompt = {"prompt": text}
    made = await renderer.tokenize_prompts_async(
        [prompt], params or renderer.default_cmpl_tok_params
    )
    return made[0]["prompt_token_ids"]


@given(talk=conversations)
def test_a_chat_has_vllms_tokens_for_any_text(renderer, talk):
    messages = [{"role": role, "content": text} for role, text in talk]
    params = ChatParams(chat_template_kwargs={"tokenize": False, "add_generation_prompt": True})

    async def rendered(tenant, turns):
        generated.begin(tenant)
        _, (made,) = await renderer.render_chat_async([turns], params)
        return made["prompt_token_ids"]

    for turns in (messages[:-1] or messages, messages, messages):
        theirs = asyncio.run(rendered("", turns))
        assert asyncio.run(rendered("t", turns)) == theirs


@given(text=texts, special=st.booleans())
def test_a_completion_has_vllms_tokens_for_any_text(renderer, text, special):
    params = TokenizeParams(max_total_tokens=MOST_TOKENS, add_special_tokens=special)
    theirs = renderer._tokenize_prompt({"prompt": text}, params)["prompt_token_ids"]
    assert asyncio.run(ids_of(renderer, text, params=params)) == theirs


async def test_only_what_is_new_is_encoded(renderer, encoded):
    talk = "<|user|>only once<|end|><|assistant|>yes<|end|>"
    await ids_of(renderer, talk)
    encoded.clear()
    await ids_of(renderer, f"{talk}<|user|>and then<|end|>")
    assert encoded == ["and then"]


async def test_a_tenant_does_not_profit_of_what_another_sent(renderer, encoded):
    await ids_of(renderer, "<|user|>a secret<|end|>", "alice")
    encoded.clear()
    await ids_of(renderer, "<|user|>a secret<|end|>", "bob")
    assert encoded == ["a secret"]


async def test_a_request_without_a_tenant_goes_vllms_own_way(renderer, encoded):
    assert await ids_of(renderer, "unowned", "") and not encoded


async def test_long_text_encoded_off_the_loop_has_the_same_tokens(renderer):
    text = "<|user|>Hello world\n" * 1500 + "end"
    params = TokenizeParams(max_total_tokens=None)
    theirs = renderer._tokenize_prompt({"prompt": text}, params)["prompt_token_ids"]
    assert await ids_of(renderer, text, params=params) == theirs


@pytest.mark.parametrize("side", [None, "left", "right"])
async def test_a_prompt_is_cut_as_vllm_cuts_it(renderer, side):
    text = "Hello world " * 40
    params = TokenizeParams(
        max_total_tokens=MOST_TOKENS, truncate_prompt_tokens=16, truncation_side=side
    )
    (theirs,) = renderer.tokenize_prompts([{"prompt": text}], params)
    ours = await ids_of(renderer, text, params=params)
    assert ours == theirs["prompt_token_ids"] and len(ours) == 16


async def test_a_prompt_that_is_too_long_is_refused_as_by_vllm(renderer):
    params = TokenizeParams(max_total_tokens=8)
    with pytest.raises(VLLMValidationError, match="maximum context length is 8 tokens"):
        await ids_of(renderer, "Hello world " * 9, params=params)


async def test_half_a_character_fails_as_in_vllm(renderer):
    params = renderer.default_cmpl_tok_params
    failed = []
    for tokenize in (renderer.stock, renderer._tokenize_prompt_async):
        with pytest.raises(Exception) as error:
            await tokenize({"prompt": "a\ud800b"}, params)
        failed.append(error.type)
    assert failed[0] is failed[1]


def trained(pre_tokenizer, decoder, kind=TokenizersBackend):
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizer, decoder
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet))
    made.add_special_tokens(list(SPECIAL_TOKENS))
    return kind(tokenizer_object=made)


def test_install_leaves_a_tokenizer_whose_cuts_are_unproved(renderer):
    first = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    other = copy.copy(renderer)
    other.tokenizer, other._tokenize_prompt_async = trained(first, decoders.Metaspace()), None
    assert not incremental_prompts.install(other) and other._tokenize_prompt_async is None


def test_a_tokenizer_that_vllm_uses_otherwise_is_left_as_it_is(renderer):
    other = copy.copy(renderer)
    other._tokenize_prompt_async = None
    other._tokenize_prompt = lambda prompt, params: {"prompt_token_ids": [1]}
    assert not incremental_prompts.install(other) and other._tokenize_prompt_async is None


def test_a_model_without_a_tokenizer_is_left_as_it_is():
    assert not incremental_prompts.install(SimpleNamespace(tokenizer=None))


# -- decoding -------------------------------------------------------------------------------------

DECODED = {
    "byte_level": trained(pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()),
    "pieces": trained(pre_tokenizers.Metaspace(), decoders.Sequence([
        decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ])),
}  # fmt: skip


def decoded(cls, tokenizer, prompt, answer, skip):
    params = SamplingParams(skip_special_tokens=skip)
    made = cls(tokenizer, EngineCoreRequest("r", prompt, None, params, None, 0.0, None, None, None))
    return [made.decode_next(token) for token in answer]


@pytest.mark.parametrize("name", DECODED)
@given(
    prompt=st.lists(st.integers(0, 505), min_size=1, max_size=200),
    answer=st.lists(st.integers(0, 505), min_size=1, max_size=8),
    skip=st.booleans(),
)
def test_an_answer_is_decoded_as_by_vllm_behind_any_prompt(name, prompt, answer, skip):
    tokenizer = DECODED[name]
    theirs = decoded(STOCK, tokenizer, prompt, answer, skip)
    ours = decoded(incremental_prompts.TailDetokenizer, tokenizer, prompt, answer, skip)
    assert ours == theirs


def test_an_answer_is_decoded_behind_the_prompts_last_tokens(monkeypatch):
    given_ids = []
    stream = detokenizer.tokenizers.decoders.DecodeStream

    def begun(ids, skip_special_tokens):
        given_ids.extend(ids)
        return stream(ids=ids, skip_special_tokens=skip_special_tokens)

    monkeypatch.setattr(detokenizer.tokenizers.decoders, "DecodeStream", begun)
    tokenizer = DECODED["byte_level"]
    prompt = tokenizer("Hello world " * 200).input_ids
    decoded(incremental_prompts.TailDetokenizer, tokenizer, prompt, [], True)
    assert given_ids == prompt[-len(given_ids) :] and len(given_ids) < len(prompt) / 2


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.CTC()])
def test_other_decoders_begin_with_the_whole_prompt(renderer, decoder):
    other = copy.copy(renderer)
    other.tokenizer = trained(pre_tokenizers.ByteLevel(), decoder)
    detokenizer.FastIncrementalDetokenizer = STOCK
    incremental_prompts.install(other)
    assert detokenizer.FastIncrementalDetokenizer is STOCK

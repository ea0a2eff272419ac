"""Tokens of a text, part by part, against the tokenizer's own."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from kappa import incremental_tokenizer
from kappa.incremental_tokenizer import IncrementalTokenizer, SegmentCache

CORPUS = [
    "Hello world, it's 12345 o'clock.\nThe user said: été.\n", "\nuser\nassistant\n  indented\n\n",
    "def f(x):\n    return x\n", "中文 text and more\n", "The quick brown fox jumps\nover it\n",
] * 4  # fmt: skip
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIALS = ["<|im_start|>", "<|im_end|>", "<|im_start|>x", "<s>"]


def trained(pre_tokenizer, normalizer=None, model=None) -> Tokenizer:
    made = Tokenizer(model or models.BPE())
    made.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        made.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet))
    made.add_special_tokens(SPECIALS)
    return made


def byte_level() -> Tokenizer:
    return trained(pre_tokenizers.ByteLevel(add_prefix_space=False))


def split_by_pattern() -> Tokenizer:
    split = pre_tokenizers.Split(Regex(CL100K), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return trained(pre_tokenizers.Sequence([split, level]), normalizers.NFC())


def sentence_piece(scheme: str) -> Tokenizer:
    return trained(pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False))


def whole(tokenizer: Tokenizer, text: str, special: bool = False) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=special).ids)


PROVED = {"byte_level": byte_level(), "split": split_by_pattern()}
pieces = st.one_of(
    st.sampled_from([*SPECIALS, "\n", "\n\n", " ", "user\n", ".\nThe", "a", "'s", "中", "<|im"]),
    st.text(max_size=8),
)


@pytest.mark.parametrize("name", PROVED)
def test_exactness_is_proved_for_byte_level_tokenizers(name):
    exact = IncrementalTokenizer(PROVED[name]).exact
    assert exact.specials
    assert exact.boundaries


@pytest.mark.parametrize("name", PROVED)
@given(parts=st.lists(pieces, max_size=30))
def test_encode_equals_the_tokenizer_for_any_text(name, parts):
    tokenizer, text = PROVED[name], "".join(parts)
    incremental = ONE_CHUNK[name]
    # Twice: from nothing, and from the remembered parts.
    for _ in range(2):
        assert incremental.encode(text).tolist() == whole(tokenizer, text)


def cut_small(tokenizer: Tokenizer) -> IncrementalTokenizer:
    return IncrementalTokenizer(tokenizer, SegmentCache(1 << 16))


ONE_CHUNK = {name: cut_small(tokenizer) for name, tokenizer in PROVED.items()}


@pytest.fixture(autouse=True, scope="module")
def small_chunks():
    before, incremental_tokenizer._CHUNK_CHARS = incremental_tokenizer._CHUNK_CHARS, 6
    yield
    incremental_tokenizer._CHUNK_CHARS = before


def test_encode_needs_only_new_parts_of_a_longer_talk():
    incremental = IncrementalTokenizer(byte_level())
    talk = "<|im_start|>user\nHello world.\nThe fox<|im_end|>\n"
    incremental.encode(talk)
    looked_up = incremental.look_up(f"{talk}<|im_start|>assistant\nover")
    assert looked_up.missing == ["assistant\n", "over"]
    assert incremental.look_up(talk).missing == []


def test_encode_keeps_parts_before_a_change_in_a_long_text():
    incremental = IncrementalTokenizer(byte_level())
    lines = [f"Line number {n}.\n" for n in "abcdefgh"]
    incremental.encode("".join(lines))
    changed = "".join([*lines[:5], "Another line.\n", *lines[6:]])
    assert incremental.look_up(changed).missing == ["Another line.\n"]


def test_look_up_takes_the_longest_special_token():
    assert whole(PROVED["byte_level"], "<|im_start|>xy") == [
        *whole(PROVED["byte_level"], "<|im_start|>x"), *whole(PROVED["byte_level"], "y"),
    ]  # fmt: skip
    incremental = IncrementalTokenizer(PROVED["byte_level"])
    assert incremental.encode("<|im_start|>xy").tolist() == whole(
        PROVED["byte_level"], "<|im_start|>xy"
    )


def test_cache_keeps_tenants_apart():
    incremental = IncrementalTokenizer(byte_level())
    incremental.encode("Hello world", "alice")
    assert incremental.look_up("Hello world", "alice").missing == []
    assert incremental.look_up("Hello world", "bob").missing == ["Hello world"]


def test_cache_keeps_its_bound_in_bytes():
    cache = SegmentCache(3 * (incremental_tokenizer._ENTRY_BYTES + 40))
    for number in range(10):
        cache.put(bytes([number]), np.arange(10, dtype=np.int32))
    assert cache.size_bytes <= 3 * (incremental_tokenizer._ENTRY_BYTES + 40)
    assert cache.get(b"\x09") is not None
    assert cache.get(b"\x06") is None


def test_cache_counts_a_replaced_entry_once():
    cache = SegmentCache(1 << 20)
    for _ in range(5):
        cache.put(b"k", np.arange(10, dtype=np.int32))
    assert cache.size_bytes == incremental_tokenizer._ENTRY_BYTES + 40


def test_encode_puts_special_tokens_around_a_text():
    tokenizer = byte_level()
    start = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", start)]
    )
    incremental = IncrementalTokenizer(tokenizer)
    text = "Hello world.\nThe fox"
    assert incremental.encode(text, add_special_tokens=True).tolist() == whole(
        tokenizer, text, special=True
    )
    assert incremental.encode(text).tolist() == whole(tokenizer, text)


def test_encode_is_exact_without_special_tokens():
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = Tokenizer.from_str(trained(level).to_str())
    plain = json.loads(tokenizer.to_str()) | {"added_tokens": []}
    tokenizer = Tokenizer.from_str(json.dumps(plain))
    incremental = IncrementalTokenizer(tokenizer)
    for text in ("User: Hello.\nThe fox", "User: Hello.\nThe fox\nBot: over the dog.\n"):
        assert incremental.encode(text).tolist() == whole(tokenizer, text)


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_exactness_is_denied_where_a_part_gets_a_prefix(scheme):
    tokenizer = sentence_piece(scheme)
    incremental = IncrementalTokenizer(tokenizer)
    assert not incremental.exact.boundaries
    text = "Hello\nworld<|im_end|>more text"
    assert incremental.encode(text).tolist() == whole(tokenizer, text)
    if not incremental.exact.specials:
        assert IncrementalTokenizer(tokenizer).look_up(text).missing == [text]


def test_encode_equals_the_whole_when_a_token_strips_its_sides():
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken("<strip>", lstrip=True, rstrip=True)])
    incremental = IncrementalTokenizer(tokenizer)
    for text in ("a <strip> b", "<|im_end|> <strip> <|im_end|>", " <strip><|im_start|> x"):
        assert incremental.encode(text).tolist() == whole(tokenizer, text)


def test_exactness_is_denied_to_tokens_of_single_words():
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("word", single_word=True, normalized=False)])
    exact = IncrementalTokenizer(tokenizer).exact
    assert not exact.specials
    assert not exact.boundaries


def test_exactness_is_denied_without_a_pre_tokenizer():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300))
    assert not IncrementalTokenizer(tokenizer).exact.boundaries

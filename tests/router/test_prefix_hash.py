"""Prefix hashes: extension equals hashing from the start, and different input, different hash."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kappa_router.index.prefix_hash import ROOT, PrefixHasher, salt_of, secret_from_seed

SECRET = secret_from_seed("tests")
TOKENS = st.lists(st.integers(0, 200_000), max_size=60)


def test_hashes_are_one_per_full_block():
    hasher = PrefixHasher(16, SECRET)
    assert hasher.prefix_hashes([]).shape == (0,)
    assert hasher.prefix_hashes(list(range(15))).shape == (0,)
    assert hasher.prefix_hashes(list(range(47))).shape == (2,)
    assert hasher.prefix_hashes(list(range(48))).dtype == np.uint64


@given(TOKENS, TOKENS, st.integers(1, 5), st.integers(0, 2**64 - 1))
@settings(max_examples=200, deadline=None)
def test_hashes_depend_on_the_prefix_only(tokens, other, size, salt):
    hasher = PrefixHasher(size, SECRET)
    one, two = hasher.prefix_hashes(tokens, salt), hasher.prefix_hashes(other, salt)
    for k in range(min(len(one), len(two))):
        same = tokens[: (k + 1) * size] == other[: (k + 1) * size]
        assert (one[k] == two[k]) == same


def test_long_prompts_are_hashed_in_pieces_that_fit_together():
    tokens = np.random.default_rng(0).integers(0, 150_000, 50_000)
    for size in (16, 512, 30_000):
        hasher, reference = PrefixHasher(size, SECRET), PrefixHasher(size, SECRET)
        parent, pieces = ROOT, []
        for first in range(0, len(tokens) - size + 1, size):
            pieces += reference.extend(parent, tokens[first : first + size]).tolist()
            parent = reference.running(pieces[-1], len(pieces))
        assert hasher.prefix_hashes(tokens).tolist() == pieces


@given(TOKENS, st.integers(1, 5), st.integers(0, 20), st.integers(0, 2**64 - 1))
@settings(max_examples=200, deadline=None)
def test_extending_a_prefix_equals_hashing_from_the_start(tokens, size, cut, salt):
    hasher = PrefixHasher(size, SECRET)
    whole = hasher.prefix_hashes(tokens, salt).tolist()
    cut = min(cut, len(whole))
    parent = hasher.running(whole[cut - 1], cut, salt) if cut else ROOT
    assert hasher.extend(parent, tokens[cut * size :], salt).tolist() == whole[cut:]


def test_input_forms_agree():
    hasher = PrefixHasher(4, SECRET)
    expected = hasher.prefix_hashes(list(range(40))).tolist()
    for dtype in (np.int32, np.int64, np.uint16, np.uint64):
        assert hasher.prefix_hashes(np.arange(40, dtype=dtype)).tolist() == expected
    assert hasher.prefix_hashes(tuple(range(40))).tolist() == expected
    assert hasher.prefix_hashes(np.arange(80)[::2] // 2).tolist() == expected
    negative = [-1, 5, 2**40, 7]
    assert hasher.prefix_hashes(negative).tolist() == hasher.prefix_hashes(np.array(negative))


def test_growing_the_weights_changes_nothing():
    short, long = PrefixHasher(16, SECRET), PrefixHasher(16, SECRET)
    tokens = np.arange(20_000)
    before = short.prefix_hashes(tokens[:4096])
    assert long.prefix_hashes(tokens)[:256].tolist() == before.tolist()
    assert short.prefix_hashes(tokens).tolist() == long.prefix_hashes(tokens).tolist()


def test_secret_salt_and_depth_all_matter():
    tokens = [0] * 64
    hashes = PrefixHasher(16, SECRET).prefix_hashes(tokens)
    salted = PrefixHasher(16, SECRET).prefix_hashes(tokens, salt=salt_of("tenant"))
    other = PrefixHasher(16, SECRET ^ 1).prefix_hashes(tokens)
    everything = [*hashes.tolist(), *salted.tolist(), *other.tolist()]
    assert len(set(everything)) == 12


def test_thue_morse_sequences_do_not_collide():
    """They collide under every polynomial hash modulo 2^64, whatever its base."""
    parity = np.array([bin(i).count("1") & 1 for i in range(1 << 13)])
    hasher = PrefixHasher(32, SECRET)
    one, two = hasher.prefix_hashes(7 + 4 * parity), hasher.prefix_hashes(11 - 4 * parity)
    assert not np.any(one == two)


def test_bits_look_random():
    rng = np.random.default_rng(0)
    hashes = PrefixHasher(1, SECRET).prefix_hashes(rng.integers(0, 50_000, 20_000))
    bits = (hashes[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 0.02
    assert len(np.unique(hashes)) == 20_000


def test_salts_differ_by_tenant_and_adapter():
    assert salt_of(None) == salt_of("") == 0
    salts = [salt_of("a"), salt_of("b"), salt_of(None, "a"), salt_of("a", "b"), salt_of("ab")]
    assert len(set(salts)) == 5 and 0 not in salts
    assert secret_from_seed("x") == secret_from_seed(b"x") != secret_from_seed("y")


def test_values_are_the_same_on_every_machine():
    """Decider replicas of two releases share nothing but the seed: a change here is breaking."""
    assert salt_of("a") == 0xAD4AA8EFAAD6F07A
    assert SECRET == 0xF129A7E386EE7E76
    hashes = PrefixHasher(2, 1).prefix_hashes([1, 2, 3, 4])
    assert hashes.tolist() == [0x46B725E49EA37A5C, 0x4090FD9CD86CAD2E]


@pytest.mark.parametrize("bad", [np.zeros((2, 2), dtype=int), [0.5, 1.0], ["a"]])
def test_hasher_refuses_what_are_not_tokens(bad):
    with pytest.raises(ValueError, match="one-dimensional run of integers"):
        PrefixHasher(2, SECRET).prefix_hashes(bad)


def test_hasher_refuses_bad_parameters():
    with pytest.raises(ValueError, match="block_tokens"):
        PrefixHasher(0, SECRET)
    with pytest.raises(ValueError, match="64 unsigned bits"):
        PrefixHasher(16, 1 << 64)

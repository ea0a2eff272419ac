"""Keys and their digests, and the file that holds them."""

import pytest

from kappa.keys import digest_of, entry_digest, entry_fault, hashed, new_key, read_digests


def test_a_key_can_be_sent_and_two_random_ones_differ():
    first, second = new_key(bytes(32)), new_key(bytes(31) + b"\x01")
    assert first != second
    assert entry_fault(first) is None and first.isascii()


def test_too_few_random_bytes_make_no_key():
    with pytest.raises(ValueError, match="32 random bytes, got 16"):
        new_key(bytes(16))


def test_a_key_and_its_digest_are_the_same_entry():
    assert (
        entry_digest(hashed("sk-a-0123456789a"))
        == entry_digest("sk-a-0123456789a")
        == digest_of("sk-a-0123456789a")
    )
    assert entry_digest(
        hashed("sk-a-0123456789a").replace("a", "A").replace("shA", "sha")
    ) == digest_of("sk-a-0123456789a")


@pytest.mark.parametrize(
    "entry", ["", "sk hush", "sk-hüsh", "sk\thush", "sha256:", "sha256:hush", "sha256:" + "g" * 64]
)
def test_what_is_neither_is_told_without_its_text(entry):
    with pytest.raises(ValueError) as caught:
        entry_digest(entry)
    assert "hush" not in str(caught.value) and "hüsh" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sk-hush-01234567: a\nsk-hush-01234567: b\n", "line 2 gives a key a second time"),
        ("sk-hush-01234567: a\nsk-hush-01234567: a\n", "line 2 gives a key a second time"),
        ("sk-a-0123456789a: a\n1234: b\n", "entry 2: the key is no text"),
        ("sk-a-0123456789a: a\nsk-hush-01234567: [b]\n", "entry 2: the tenant is no name"),
        ("sk-a-0123456789a: a\nsk-hush-01234567: b c\n", "entry 2: the tenant is no name"),
        ("sk-a-0123456789a: a\nsha256:hush: b\n", "entry 2: the key is no digest"),
        ("? [sk-hush-01234567]\n: a\n", "is not YAML"),
        ("- sk-hush-01234567\n", "is no mapping"),
        ("sk-hush-01234567\n", "is no mapping"),
        ("sk-hush-01234567: alice: bob\n", "is not YAML"),
        ("'': alice\n", "entry 1: the key is empty"),
        ("'sk hush': alice\n", "without spaces"),
        ("sk-hüsh: alice\n", "not plain ASCII"),
        ("&a {k: *a}\n", "entry 1: the tenant is no name"),
        (
            f"sk-hush-01234567: a\n{hashed('sk-hush-01234567')}: b\n",
            "entry 2: another entry gives the same key",
        ),
    ],
)
def test_read_digests_tells_each_fault_with_its_place_and_no_key(tmp_path, text, says):
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        read_digests(path)
    message = str(caught.value)
    assert (
        says in message and str(path) in message and "hush" not in message and "hüsh" not in message
    )


def test_a_keys_file_of_any_size_is_not_read_whole(tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_bytes(b"#" * (5 << 20))
    with pytest.raises(ValueError, match="more than 4194304 bytes"):
        read_digests(path)


def test_clear_and_hashed_keys_stand_side_by_side(tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text(f"sk-a-0123456789a: alice\n{hashed('sk-b-0123456789a')}: bob\n")
    assert read_digests(path) == {
        digest_of("sk-a-0123456789a"): "alice",
        digest_of("sk-b-0123456789a"): "bob",
    }


def test_entry_fault_wants_16_characters_of_clear_keys_only():
    assert entry_fault("k" * 16) is None and entry_fault(hashed("k")) is None
    assert "has 15 characters" in entry_fault("k" * 15)
    assert "kappa keys new" in entry_fault("k")


def test_read_digests_refuses_a_file_cut_short_with_a_remedy(tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text(f"{hashed('a')}: alice\n{hashed('b')}: bo")
    with pytest.raises(ValueError, match="may be cut short: end it with one"):
        read_digests(path)

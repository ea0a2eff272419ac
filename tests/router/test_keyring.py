"""Keys change while an ingress runs: new ones are known, removed ones refused, slips survived."""

import errno
import os
from pathlib import Path

import pytest

from kappa.keys import digest_of, hashed
from router.access.keyring import Keyring
from router.access.tenants import Tenants


class File:
    """A keys file that is written as editors and Kubernetes do: another file in its place."""

    def __init__(self, path):
        self.path, self.writes = path, 0

    def write(self, text):
        self.writes += 1
        new = self.path.with_suffix(f".{self.writes}")
        new.write_text(text)
        os.replace(new, self.path)


@pytest.fixture
def file(tmp_path):
    made = File(tmp_path / "keys.yaml")
    made.write("sk-old: alice\n")
    return made


def keyring(file, fixed=("sk-fixed",), refuse=True, at_start=("sk-old",)):
    by_digest = {digest_of(key): "alice" for key in (*fixed, *at_start)}
    tenants = Tenants.of_digests(
        by_digest, {"bob": 3.0}, refuse=refuse, fixed=frozenset(map(digest_of, fixed)), blind=b"x"
    )
    return Keyring(tenants, str(file.path), check_s=2.0)


def name(ring, key, now_s):
    tenant = ring.current(now_s).find([key])
    return tenant and tenant.name


def test_an_old_key_is_valid_until_it_is_removed_and_a_new_one_from_the_next_look_on(file):
    ring = keyring(file)
    assert name(ring, "sk-old", 0.0) == "alice"
    file.write(f"sk-old: alice\n{hashed('sk-new')}: alice\n")
    assert name(ring, "sk-new", 1.9) is None
    assert name(ring, "sk-new", 2.0) == name(ring, "sk-old", 2.0) == "alice"
    file.write(f"{hashed('sk-new')}: alice\n")
    assert name(ring, "sk-old", 3.9) == "alice"
    assert name(ring, "sk-old", 4.0) is None and name(ring, "sk-new", 4.0) == "alice"


def test_keys_of_the_settings_stay_whatever_the_file_says(file):
    ring = keyring(file)
    file.write("sk-fixed: mallory\nsk-x: bob\n")
    assert name(ring, "sk-fixed", 0.0) == "alice"
    assert ring.current(0.0).find(["sk-x"]).weight == 3.0


def test_a_key_removed_before_an_ingress_starts_is_not_brought_back_by_its_settings(file):
    file.write("sk-new: alice\n")
    assert name(keyring(file), "sk-old", 0.0) is None


@pytest.mark.parametrize(
    "text",
    ["[sk-hush]", "sk-hush", "sk-hush: alice: bob", "sk-hush: 'a b'", "sha256:hush: alice", "",
     "sk-hush: a\nsk-hush: b\n", "\x00", "{a: &x [*x]}"],
)  # fmt: skip
def test_a_slip_keeps_the_keys_that_were_there_and_is_told_once_without_text(file, text, capsys):
    ring = keyring(file, fixed=())
    assert name(ring, "sk-old", 0.0) == "alice"
    file.write(text)
    for now_s in (2.0, 4.0, 6.0):
        assert name(ring, "sk-old", now_s) == "alice"
    told = "".join(capsys.readouterr())
    assert told.count("keys_not_reloaded") == 1 and "hush" not in told
    assert ring.faults == 1
    file.write("sk-new: alice\n")
    assert name(ring, "sk-old", 8.0) is None and name(ring, "sk-new", 8.0) == "alice"


def test_a_file_that_goes_away_keeps_its_keys_until_it_is_back(file, capsys):
    ring = keyring(file)
    assert name(ring, "sk-old", 0.0) == "alice"
    file.path.unlink()
    assert name(ring, "sk-old", 2.0) == name(ring, "sk-old", 4.0) == "alice"
    assert "".join(capsys.readouterr()).count("keys_not_reloaded") == 1
    file.write("sk-new: alice\n")
    assert name(ring, "sk-old", 6.0) is None


def test_a_file_that_could_not_be_opened_is_read_again_though_it_has_not_changed(
    file, monkeypatch, capsys
):
    ring = keyring(file)
    assert name(ring, "sk-old", 0.0) == "alice"
    file.write("sk-new: alice\n")

    def full(*_, **__):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as broken:
        broken.setattr(Path, "open", full)
        assert name(ring, "sk-old", 2.0) == name(ring, "sk-old", 4.0) == "alice"
    assert "".join(capsys.readouterr()).count("keys_not_reloaded") == 1
    assert name(ring, "sk-old", 6.0) is None and name(ring, "sk-new", 6.0) == "alice"


def test_a_file_that_this_machine_never_had_leaves_the_keys_of_the_deployment(tmp_path):
    ring = keyring(File(tmp_path / "none.yaml"))
    assert name(ring, "sk-old", 0.0) == "alice"


def test_an_unchanged_file_is_read_once(file):
    ring = keyring(file)
    for second in range(0, 100, 2):
        ring.current(float(second))
    assert ring.reloads == 1


def test_without_a_file_the_table_stays(tmp_path):
    tenants = Tenants.of({"sk-a": "a"}, {})
    assert Keyring(tenants).current(1e9) is tenants


def test_a_link_that_is_turned_to_another_file_is_followed(tmp_path):
    for version, key in (("v1", "sk-old"), ("v2", "sk-new")):
        (tmp_path / version).mkdir()
        (tmp_path / version / "keys.yaml").write_text(f"{key}: alice\n")
    data = tmp_path / "..data"
    data.symlink_to("v1")
    path = tmp_path / "keys.yaml"
    path.symlink_to("..data/keys.yaml")
    ring = keyring(File(path), fixed=())
    assert name(ring, "sk-old", 0.0) == "alice"
    (tmp_path / "next").symlink_to("v2")
    os.replace(tmp_path / "next", data)
    assert name(ring, "sk-old", 2.0) is None and name(ring, "sk-new", 2.0) == "alice"

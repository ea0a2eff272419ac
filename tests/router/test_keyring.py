"""Keys change while an ingress runs: new ones are known, removed ones refused, slips survived."""

import asyncio
import errno
import os
import threading
from pathlib import Path

import pytest

from kappa.keys import digest_of, hashed, read_digests
from kappa.protocol import MAX_TENANTS
from router.api.app import Keyring
from router.api.tenants import Tenants
from tests.router.building import tenants_of


class File:
    """A keys file that is written as editors and Kubernetes do: another file in its place."""

    def __init__(self, path):
        self.path, self.writes = path, 0

    def write(self, text):
        self.writes += 1
        new = self.path.with_suffix(f".{self.writes}")
        new.write_text(text)
        written_s(new, self.writes)
        os.replace(new, self.path)


def written_s(path, wall_s):
    """Say that a file was written then: long ago, or just now (in the future, to be sure)."""
    os.utime(path, (wall_s, wall_s))


NOW_S = 1e11


@pytest.fixture
def file(tmp_path):
    made = File(tmp_path / "keys.yaml")
    made.write("sk-old-012345678: alice\n")
    return made


def keyring(file, fixed=("sk-fixed-0123456",), refuse=True, at_start=("sk-old-012345678",)):
    by_digest = {digest_of(key): "alice" for key in (*fixed, *at_start)}
    table = Tenants(refuse=refuse, weights={"bob": 3.0}, blind=b"x")
    tenants = table.with_digests(by_digest, fixed=map(digest_of, fixed))
    return Keyring(tenants, str(file.path), check_s=2.0)


def name(ring, key, now_s):
    if now_s >= ring._next_s:
        ring.look(now_s)
    tenant = ring.tenants.find([key])
    return tenant and tenant.name


def test_an_old_key_is_valid_until_it_is_removed_and_a_new_one_from_the_next_look_on(file):
    ring = keyring(file)
    assert name(ring, "sk-old-012345678", 0.0) == "alice"
    file.write(f"sk-old-012345678: alice\n{hashed('sk-new-012345678')}: alice\n")
    assert name(ring, "sk-new-012345678", 1.9) is None
    assert name(ring, "sk-new-012345678", 2.0) == name(ring, "sk-old-012345678", 2.0) == "alice"
    file.write(f"{hashed('sk-new-012345678')}: alice\n")
    assert name(ring, "sk-old-012345678", 3.9) == "alice"
    assert (
        name(ring, "sk-old-012345678", 4.0) is None
        and name(ring, "sk-new-012345678", 4.0) == "alice"
    )


def test_keys_of_the_settings_stay_whatever_the_file_says(file):
    ring = keyring(file)
    file.write("sk-fixed-0123456: mallory\nsk-x-0123456789a: bob\n")
    assert name(ring, "sk-fixed-0123456", 0.0) == "alice"
    assert ring.tenants.find(["sk-x-0123456789a"]).weight == 3.0


def test_a_key_removed_before_an_ingress_starts_is_not_brought_back_by_its_settings(file):
    file.write("sk-new-012345678: alice\n")
    assert name(keyring(file), "sk-old-012345678", 0.0) is None


@pytest.mark.parametrize(
    "text",
    [
        "[sk-hush-01234567]", "sk-hush-01234567", "sk-hush-01234567: alice: bob",
        "sk-hush-01234567: 'a b'", "sha256:hush: alice", "", "\x00", "{a: &x [*x]}",
        "sk-hush-01234567: a\nsk-hush-01234567: b", "sk-hush-0123456: alice",
    ],
)  # fmt: skip
def test_a_slip_keeps_the_keys_that_were_there_and_is_told_once_without_text(file, text, capsys):
    ring = keyring(file, fixed=())
    assert name(ring, "sk-old-012345678", 0.0) == "alice"
    file.write(f"{text}\n")
    for now_s in (2.0, 4.0, 6.0):
        assert name(ring, "sk-old-012345678", now_s) == "alice"
    told = "".join(capsys.readouterr())
    assert told.count("keys_not_reloaded") == 1 and "hush" not in told
    assert ring.faults == 1
    file.write("sk-new-012345678: alice\n")
    assert (
        name(ring, "sk-old-012345678", 8.0) is None
        and name(ring, "sk-new-012345678", 8.0) == "alice"
    )


def test_a_file_that_goes_away_keeps_its_keys_until_it_is_back(file, capsys):
    ring = keyring(file)
    assert name(ring, "sk-old-012345678", 0.0) == "alice"
    file.path.unlink()
    assert name(ring, "sk-old-012345678", 2.0) == name(ring, "sk-old-012345678", 4.0) == "alice"
    assert "".join(capsys.readouterr()).count("keys_not_reloaded") == 1
    file.write("sk-new-012345678: alice\n")
    assert name(ring, "sk-old-012345678", 6.0) is None


def test_a_file_that_could_not_be_opened_is_read_again_though_it_has_not_changed(
    file, monkeypatch, capsys
):
    ring = keyring(file)
    assert name(ring, "sk-old-012345678", 0.0) == "alice"
    file.write("sk-new-012345678: alice\n")

    def full(*_, **__):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as broken:
        broken.setattr(Path, "open", full)
        assert name(ring, "sk-old-012345678", 2.0) == name(ring, "sk-old-012345678", 4.0) == "alice"
    assert "".join(capsys.readouterr()).count("keys_not_reloaded") == 1
    assert (
        name(ring, "sk-old-012345678", 6.0) is None
        and name(ring, "sk-new-012345678", 6.0) == "alice"
    )


def test_a_file_that_this_machine_never_had_leaves_the_keys_of_the_deployment(tmp_path):
    ring = keyring(File(tmp_path / "none.yaml"))
    assert name(ring, "sk-old-012345678", 0.0) == "alice"


def test_an_unchanged_file_is_read_once(file):
    ring = keyring(file)
    for second in range(0, 100, 2):
        ring.look(float(second))
    assert ring.reloads == 1


def test_without_a_file_the_table_stays(tmp_path):
    tenants = tenants_of({"sk-a-0123456789a": "a"}, {})
    ring = Keyring(tenants)
    ring.look(1e9)
    assert ring.tenants is tenants


def test_a_link_that_is_turned_to_another_file_is_followed(tmp_path):
    for version, key in (("v1", "sk-old-012345678"), ("v2", "sk-new-012345678")):
        (tmp_path / version).mkdir()
        (tmp_path / version / "keys.yaml").write_text(f"{key}: alice\n")
        written_s(tmp_path / version / "keys.yaml", 1.0)
    data = tmp_path / "..data"
    data.symlink_to("v1")
    path = tmp_path / "keys.yaml"
    path.symlink_to("..data/keys.yaml")
    ring = keyring(File(path), fixed=())
    assert name(ring, "sk-old-012345678", 0.0) == "alice"
    (tmp_path / "next").symlink_to("v2")
    os.replace(tmp_path / "next", data)
    assert (
        name(ring, "sk-old-012345678", 2.0) is None
        and name(ring, "sk-new-012345678", 2.0) == "alice"
    )


@pytest.mark.parametrize("text", ["{}\n", "# nobody\n{}\n", "sk-fixed-0123456: alice\n", "", "\n"])
@pytest.mark.parametrize("refuse", [True, False])
def test_a_file_without_any_key_locks_nobody_out_and_says_what_to_do(file, text, refuse, capsys):
    ring = keyring(file, refuse=refuse)
    file.write(text)
    for now_s in (2.0, 4.0):
        assert name(ring, "sk-old-012345678", now_s) == "alice"
    told = "".join(capsys.readouterr())
    assert told.count("keys_not_reloaded") == 1
    assert ring.reloads == 1 and ring.faults == 1
    file.write("sk-new-012345678: alice\n")
    assert name(ring, "sk-new-012345678", 6.0) == "alice"


def test_an_emptied_file_is_refused_with_the_number_of_keys_and_a_remedy(file, capsys):
    ring = keyring(file, at_start=())
    file.write("sk-old-012345678: alice\nsk-2-0123456789a: bob\n")
    assert name(ring, "sk-2-0123456789a", 2.0) == "bob"
    file.write("{}\n")
    assert name(ring, "sk-2-0123456789a", 4.0) == "bob"
    told = "".join(capsys.readouterr())
    assert "holds no key, and held 2" in told and "restart without keys_file" in told


def test_an_ingress_that_starts_beside_an_emptied_file_keeps_the_keys_of_the_deployment(file):
    file.write("{}\n")
    assert name(keyring(file), "sk-old-012345678", 0.0) == "alice"


def test_a_file_is_not_taken_while_it_is_being_written(file):
    ring = keyring(file)
    # An editor that writes in place has written one line of two.
    file.path.write_text("sk-new-012345678: alice\n")
    written_s(file.path, NOW_S)
    assert (
        name(ring, "sk-old-012345678", 2.0) == "alice"
        and name(ring, "sk-new-012345678", 2.4) is None
    )
    file.path.write_text("sk-new-012345678: alice\nsk-old-012345678: alice\n")
    written_s(file.path, NOW_S + 1)
    assert (
        name(ring, "sk-old-012345678", 2.5) == "alice"
        and name(ring, "sk-new-012345678", 2.9) is None
    )
    # The same at two looks in a row.
    assert name(ring, "sk-old-012345678", 3.0) == name(ring, "sk-new-012345678", 3.0) == "alice"


def test_a_change_of_long_ago_is_taken_by_the_first_request_after_it(file):
    ring = keyring(file)
    file.path.write_text("sk-new-012345678: alice\n")
    written_s(file.path, 100.0)
    assert name(ring, "sk-old-012345678", 2.0) is None


@pytest.mark.parametrize("cut", range(1, len("sk-new-012345678: alice-and-bob")))
def test_a_file_that_stays_cut_short_within_a_line_is_never_taken(file, cut, capsys):
    ring = keyring(file)
    file.write(
        "sk-old-012345678: alice\nsk-new-012345678: alice-and-bob\n"[
            : len("sk-old-012345678: alice\n") + cut
        ]
    )
    assert (
        name(ring, "sk-old-012345678", 2.0) == "alice"
        and name(ring, "sk-new-012345678", 2.0) is None
    )
    assert "may be cut short" in "".join(capsys.readouterr())


def test_more_tenants_than_are_kept_apart_are_refused_when_the_file_changes(file, capsys):
    # alice, of the settings, and 1,023 others are 1,024; one more is too many.
    others = "".join(f"sk-{i:013d}: t{i}\n" for i in range(MAX_TENANTS - 1))
    ring = keyring(file)
    file.write(others)
    assert name(ring, "sk-0000000000000", 2.0) == "t0"
    file.write(f"{others}sk-more-01234567: more\n")
    assert (
        name(ring, "sk-more-01234567", 4.0) is None and name(ring, "sk-0000000000000", 4.0) == "t0"
    )
    assert "1025 tenants; at most 1024" in "".join(capsys.readouterr())


async def test_the_file_is_read_on_a_thread_and_only_by_the_request_that_finds_it_due(
    file, monkeypatch
):
    ring = keyring(file)
    readers, started, go_on = [], threading.Event(), threading.Event()

    def slowly(path):
        readers.append(threading.current_thread())
        started.set()
        assert go_on.wait(30.0)
        return read_digests(path)

    monkeypatch.setattr("router.api.app.read_digests", slowly)
    file.write("sk-new-012345678: alice\n")
    first = asyncio.create_task(ring.refresh(2.0))
    assert await asyncio.to_thread(started.wait, 30.0)
    await ring.refresh(2.1)  # not due: the loop is free, and this one does not wait
    assert ring.tenants.find(["sk-old-012345678"]).name == "alice"
    go_on.set()
    await first
    assert ring.tenants.find(["sk-new-012345678"]).name == "alice"
    assert len(readers) == 1 and readers[0] is not threading.main_thread()

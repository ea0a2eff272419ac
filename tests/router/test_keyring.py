"""Keys change while a decider runs: new ones are known, removed ones refused, slips survived."""

import asyncio
import errno
import os
import threading
from pathlib import Path

import pytest

from kappa.keys import digest_of, hashed, read_digests
from kappa.protocol import MAX_TENANTS
from kappa_router.api.app import Keyring
from kappa_router.api.tenants import Tenants

OLD, NEW, FIXED = "sk-old-012345678", "sk-new-012345678", "sk-fixed-0123456"
NOW_S = 1e11
"""As the time of writing of a file: in the future, to be sure that it is a moment ago."""


class File:
    """A keys file that is written as editors and Kubernetes do: another file in its place."""

    def __init__(self, path):
        self.path, self.writes = path, 0

    def write(self, text):
        self.writes += 1
        new = self.path.with_suffix(f".{self.writes}")
        new.write_text(text)
        os.utime(new, (self.writes, self.writes))  # long ago
        os.replace(new, self.path)

    def write_in_place(self, text, written_s):
        self.path.write_text(text)
        os.utime(self.path, (written_s, written_s))


@pytest.fixture
def file(tmp_path):
    made = File(tmp_path / "keys.yaml")
    made.write(f"{OLD}: alice\n")
    return made


def keyring(file, fixed=(FIXED,), refuse=True, at_start=(OLD,)):
    by_digest = {digest_of(key): "alice" for key in (*fixed, *at_start)}
    table = Tenants(refuse=refuse, weights={"bob": 3.0}, blind=b"x")
    tenants = table.with_digests(by_digest, fixed=map(digest_of, fixed))
    return Keyring(tenants, str(file.path), check_s=2.0)


def known(ring, now_s, *keys):
    """Of OLD and NEW, or of `keys`, those that are known to somebody who comes then."""
    if now_s >= ring._next_s:
        ring.look(now_s)
    names = found(ring, *(keys or (OLD, NEW)))
    return list(names)


def found(ring, *keys):
    tenants = {key: ring.tenants.find([key]) for key in keys}
    return {key: t.name for key, t in tenants.items() if t is not None and t.name != "default"}


def test_keys_change_at_the_next_look_at_the_file(file):
    ring = keyring(file)
    assert known(ring, 0.0) == [OLD]
    file.write(f"{OLD}: alice\n{hashed(NEW)}: alice\n")
    assert known(ring, 1.9) == [OLD]
    assert known(ring, 2.0) == [OLD, NEW]
    file.write(f"{hashed(NEW)}: alice\n")
    assert known(ring, 3.9) == [OLD, NEW]
    assert known(ring, 4.0) == [NEW]


def test_keys_of_the_settings_stay_whatever_the_file_says(file):
    ring = keyring(file)
    file.write(f"{FIXED}: mallory\nsk-x-0123456789a: bob\n")
    ring.look(0.0)
    assert found(ring, FIXED, "sk-x-0123456789a") == {FIXED: "alice", "sk-x-0123456789a": "bob"}
    assert ring.tenants.find(["sk-x-0123456789a"]).weight == 3.0


def test_keys_written_before_the_start_are_read_at_it(file, tmp_path):
    file.write(f"{NEW}: alice\n")
    assert known(keyring(file), 0.0) == [NEW], "a removed key is not brought back by the settings"
    file.write("{}\n")
    assert known(keyring(file), 0.0) == [OLD], "an emptied file locks no client out"
    assert known(keyring(File(tmp_path / "never there.yaml")), 0.0) == [OLD]


@pytest.mark.parametrize(
    "text",
    [
        "[sk-hush-01234567]", "sk-hush-01234567", "sk-hush-01234567: alice: bob",
        "sk-hush-01234567: 'a b'", "sha256:hush: alice", "", "\x00", "{a: &x [*x]}",
        "sk-hush-01234567: a\nsk-hush-01234567: b", "sk-hush-0123456: alice",
        "{}", "# none\n{}", f"{FIXED}: alice",
    ],
)  # fmt: skip
@pytest.mark.parametrize("refuse", [True, False])
def test_faulty_or_keyless_file_keeps_the_known_keys(file, text, refuse, capsys):
    ring = keyring(file, refuse=refuse)
    assert known(ring, 0.0) == [OLD]
    file.write(f"{text}\n")
    for now_s in (2.0, 4.0, 6.0):
        assert known(ring, now_s) == [OLD]
    printed = "".join(capsys.readouterr())
    assert printed.count("keys_not_reloaded") == 1 and "hush" not in printed
    assert (ring.reloads, ring.faults) == (1, 1)
    file.write(f"{NEW}: alice\n")
    assert known(ring, 8.0) == [NEW]


def test_missing_or_unreadable_file_keeps_its_keys(file, monkeypatch, capsys):
    ring = keyring(file)
    assert known(ring, 0.0) == [OLD]
    file.path.unlink()
    assert known(ring, 2.0) == known(ring, 4.0) == [OLD]
    assert "".join(capsys.readouterr()).count("keys_not_reloaded") == 1
    file.write(f"{NEW}: alice\n")

    def full(*_, **__):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as broken:
        broken.setattr(Path, "open", full)
        assert known(ring, 6.0) == known(ring, 8.0) == [OLD]
    assert "".join(capsys.readouterr()).count("keys_not_reloaded") == 1
    assert known(ring, 10.0) == [NEW], "it is read again though it has not changed"


def test_unchanged_file_is_read_once_and_no_file_never(file):
    ring = keyring(file)
    for second in range(0, 100, 2):
        ring.look(float(second))
    assert ring.reloads == 1
    tenants = Tenants()
    ring = Keyring(tenants)
    ring.look(1e9)
    assert ring.tenants is tenants


def test_link_that_is_turned_to_another_file_is_followed(tmp_path):
    for version, key in (("v1", OLD), ("v2", NEW)):
        (tmp_path / version).mkdir()
        File(tmp_path / version / "keys.yaml").write_in_place(f"{key}: alice\n", 1.0)
    data, path = tmp_path / "..data", tmp_path / "keys.yaml"
    data.symlink_to("v1")
    path.symlink_to("..data/keys.yaml")
    ring = keyring(File(path), fixed=())
    assert known(ring, 0.0) == [OLD]
    (tmp_path / "next").symlink_to("v2")
    os.replace(tmp_path / "next", data)
    assert known(ring, 2.0) == [NEW]


def test_emptied_file_is_refused_with_its_count_and_a_remedy(file, capsys):
    ring = keyring(file, at_start=())
    file.write(f"{OLD}: alice\nsk-2-0123456789a: bob\n")
    ring.look(2.0)
    file.write("{}\n")
    ring.look(4.0)
    assert found(ring, OLD, "sk-2-0123456789a").keys() == {OLD, "sk-2-0123456789a"}
    printed = "".join(capsys.readouterr())
    assert "holds no key, and held 2" in printed and "restart without keys_file" in printed


def test_file_is_not_taken_while_it_is_being_written(file):
    ring = keyring(file)
    # An editor that writes in place has written one line of two.
    file.write_in_place(f"{NEW}: alice\n", NOW_S)
    assert known(ring, 2.0) == known(ring, 2.4) == [OLD]
    file.write_in_place(f"{NEW}: alice\n{OLD}: alice\n", NOW_S + 1)
    assert known(ring, 2.5) == known(ring, 2.9) == [OLD]
    # The same at two looks in a row.
    assert known(ring, 3.0) == [OLD, NEW]
    # A change of long ago is taken at once.
    file.write_in_place(f"{NEW}: alice\n", 100.0)
    assert known(ring, 5.0) == [NEW]


def test_file_cut_within_a_line_is_never_taken(file, capsys):
    whole, first = f"{OLD}: alice\n{NEW}: alice-and-bob\n", len(f"{OLD}: alice\n")
    ring = keyring(file)
    for look, end in enumerate(range(first + 1, len(whole))):
        file.write(whole[:end])
        assert known(ring, 2.0 * (look + 1)) == [OLD]
        assert ring.faults == look + 1
    assert "may be cut short" in "".join(capsys.readouterr())


def test_file_with_too_many_tenants_is_refused(file, capsys):
    # alice, of the settings, and 1,023 others are 1,024; one more is too many.
    others = "".join(f"sk-{i:013d}: t{i}\n" for i in range(MAX_TENANTS - 1))
    ring = keyring(file)
    file.write(others)
    assert known(ring, 2.0, "sk-0000000000000") == ["sk-0000000000000"]
    file.write(f"{others}sk-more-01234567: more\n")
    assert known(ring, 4.0, "sk-0000000000000", "sk-more-01234567") == ["sk-0000000000000"]
    assert "1025 tenants; at most 1024" in "".join(capsys.readouterr())


async def test_file_is_read_on_a_thread_by_one_request_when_due(file, monkeypatch):
    ring = keyring(file)
    readers, started, go_on = [], threading.Event(), threading.Event()

    def slowly(path):
        readers.append(threading.current_thread())
        started.set()
        assert go_on.wait(30.0)
        return read_digests(path)

    monkeypatch.setattr("kappa_router.api.app.read_digests", slowly)
    file.write(f"{NEW}: alice\n")
    first = asyncio.create_task(ring.refresh(2.0))
    assert await asyncio.to_thread(started.wait, 30.0)
    await ring.refresh(2.1)  # not due: the loop is free, and this one does not wait
    assert found(ring, OLD, NEW) == {OLD: "alice"}
    go_on.set()
    await first
    assert found(ring, OLD, NEW) == {NEW: "alice"}
    assert len(readers) == 1 and readers[0] is not threading.main_thread()

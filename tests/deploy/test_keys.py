"""`kappa keys`: a key is shown once, and what it writes a decider can read."""

import json
import stat

import pytest
from typer.testing import CliRunner

from kappa.keys import digest_of, read_digests
from kappa_deploy.commands.keys import app

runner = CliRunner()


def keys(*arguments, **options):
    return runner.invoke(app, list(arguments), **options)


def test_new_makes_a_long_unique_key_and_a_line_with_its_digest():
    first, second = (json.loads(keys("new", "alice", "--json").stdout) for _ in "ab")
    assert first["key"] != second["key"] and len(first["key"]) >= 43
    assert first["key"] not in first["line"]
    assert first["line"] == f"sha256:{digest_of(first['key']).hex()}: alice"


def test_a_new_key_can_go_into_a_file_that_only_its_owner_reads(tmp_path):
    file = tmp_path / "keys.yaml"
    made = [keys("new", tenant, "--file", str(file)).stdout.split()[0] for tenant in ("a", "b")]
    assert read_digests(file) == {digest_of(made[0]): "a", digest_of(made[1]): "b"}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert not any(key in file.read_text() for key in made)


def test_new_replaces_the_file_whole_and_keeps_its_mode_and_link(tmp_path):
    file, link = tmp_path / "keys.yaml", tmp_path / "link.yaml"
    file.write_text("sk-old-0123456789: alice\n")
    file.chmod(0o640)
    link.symlink_to(file)
    with file.open() as open_before:
        keys("new", "bob", "--file", str(link))
        assert open_before.read() == "sk-old-0123456789: alice\n"
    assert link.is_symlink() and sorted(read_digests(file).values()) == ["alice", "bob"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert sorted(tmp_path.iterdir()) == [file, link]


def test_a_faulty_file_is_not_made_longer(tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text("[sk-hush-01234567]\n")
    done = keys("new", "bob", "--file", str(file))
    assert done.exit_code == 2 and "is no mapping" in done.output and "hush" not in done.output
    assert file.read_text() == "[sk-hush-01234567]\n"


def test_a_key_is_hashed_from_standard_input():
    assert (
        keys("hash", input="sk-a-0123456789a\n").stdout
        == f"sha256:{digest_of('sk-a-0123456789a').hex()}\n"
    )
    line = keys("hash", "alice", input="sk-a-0123456789a\n").stdout
    assert line == f"sha256:{digest_of('sk-a-0123456789a').hex()}: alice\n"


@pytest.mark.parametrize(
    ("arguments", "text", "message"),
    [
        (("hash",), "", "is empty"),
        (("hash",), "sk hush\n", "without spaces"),
        (("hash",), "sha256:" + "0" * 64 + "\n", "is a digest already"),
        (("hash", "a b"), "sk-hush-01234567\n", "no tenant's name"),
        (("new", "a b"), "", "no tenant's name"),
        (("new", "../x"), "", "no tenant's name"),
        (("new", "a", "--file", "/nowhere/keys.yaml"), "", "cannot be written"),
        (("list", "/nowhere/keys.yaml"), "", "cannot be read"),
    ],
)
def test_bad_input_is_refused_without_repeating_the_key(arguments, text, message):
    done = keys(*arguments, input=text)
    assert done.exit_code == 2 and message in done.output and "hush" not in done.output


def test_list_counts_keys_by_tenant_and_warns_of_clear_ones(tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text(f"sk-hush-01234567: alice\nsha256:{'0' * 64}: alice\nsha256:{'1' * 64}: bob\n")
    done = keys("list", str(file), "--json")
    assert json.loads(done.stdout)["tenants"] == [
        {"tenant": "alice", "keys": 2, "in_clear": 1}, {"tenant": "bob", "keys": 1, "in_clear": 0},
    ]  # fmt: skip
    shown = keys("list", str(file)).output
    assert "in the clear let in whoever reads" in shown.replace("\n", " ") and "hush" not in shown


@pytest.mark.parametrize("tenant", ["no", "007", "null", "1e3", "2026-01-02", "team-7"])
def test_new_quotes_tenant_names_that_yaml_would_misread(tenant, tmp_path):
    file = tmp_path / "keys.yaml"
    assert keys("new", tenant, "--file", str(file)).exit_code == 0
    assert keys("new", "alice", "--file", str(file)).exit_code == 0
    with file.open("a") as out:
        out.write(keys("hash", tenant, input="sk-mine-01234567\n").stdout)
    assert sorted(read_digests(file).values()) == sorted([tenant, "alice", tenant])

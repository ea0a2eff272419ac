"""The dependency audit: floors without a network, pip-audit's report where there is one."""

import datetime
import json
import subprocess

import pytest

from deploy import audit
from deploy.audit import (
    Accepted,
    AuditError,
    Floor,
    Rules,
    below_floors,
    faults,
    findings,
    pins,
    read_rules,
    unused,
)

TODAY = datetime.date(2026, 6, 1)
LOCK = """\
# made by uv
Jinja2==3.1.2 \\
    --hash=sha256:00
h11==0.16.0 ; python_version > "3"
python_multipart==0.0.17
torch==2.13.0+cpu
    # via vllm
"""


def rules(**accepted):
    floors = {"jinja2": ("3.1.6", "CVE-1"), "h11": ("0.16.0", "CVE-2"), "gone": ("9", "CVE-3")}
    return Rules(
        floors={name: Floor(version=least, advisory=why) for name, (least, why) in floors.items()},
        accepted=[
            Accepted(advisory=name.replace("_", "-"), reason="tests", until=until)
            for name, until in accepted.items()
        ],
    )


def test_the_pins_of_a_lock_are_read_with_normal_names():
    assert pins(LOCK) == {
        "jinja2": "3.1.2", "h11": "0.16.0", "python-multipart": "0.0.17", "torch": "2.13.0+cpu",
    }  # fmt: skip


def test_a_package_below_its_floor_is_a_fault_and_one_at_it_is_none():
    (found,) = below_floors(pins(LOCK), rules())
    assert (found.package, found.version) == ("jinja2", "3.1.2")
    assert faults([found], rules(), TODAY) == ["jinja2 3.1.2: CVE-1 (fixed in 3.1.6)"]


@pytest.mark.parametrize(("day", "passes"), [(TODAY, True), (datetime.date(2026, 5, 31), False)])
def test_what_is_accepted_passes_until_its_last_day(day, passes):
    accepted = rules(CVE_1=day)
    wrong = faults(below_floors(pins(LOCK), accepted), accepted, TODAY)
    assert (wrong == []) is passes
    assert passes or "which is past" in wrong[0]


def test_an_unused_entry_is_a_fault():
    accepted = rules(CVE_1=TODAY, CVE_9=TODAY)
    (wrong,) = unused(below_floors(pins(LOCK), accepted), accepted)
    assert "CVE-9" in wrong and "drop the entry" in wrong


def report(*vulns, skipped=0):
    packages = [{"name": f"p{i}", "version": "1", "vulns": []} for i in range(8)]
    packages[0]["vulns"] = list(vulns)
    return {"dependencies": packages + [{"name": "s", "skip_reason": "?"}] * skipped}


def test_a_finding_of_pip_audit_is_accepted_by_any_of_its_names():
    vuln = {"id": "PYSEC-1", "aliases": ["CVE-7"], "fix_versions": ["2"]}
    (found,) = findings(report(vuln, skipped=2))
    assert str(found) == "p0 1: CVE-7, PYSEC-1 (fixed in 2)"
    assert faults([found], rules(CVE_7=TODAY), TODAY) == []


@pytest.mark.parametrize(
    ("report", "why"),
    [
        (report(skipped=3), "knew 8 of 11"),
        ({"dependencies": []}, "knew 0 of 0"),
        ({"packages": []}, "another shape"),
        ([], "another shape"),
        ({"dependencies": [{"name": "p"}]}, "another shape"),
    ],
)
def test_an_incomplete_report_is_no_audit(report, why):
    with pytest.raises(AuditError, match=why):
        findings(report)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[]", "Rules"),
        ("floors: {}", "accepted\n.*required"),
        ("floors: {a: 1}\naccepted: []", "floors.a"),
        ("floors: {}\naccepted: [{advisory: X}]", "accepted.0.reason"),
        ("floors: {}\naccepted: [{advisory: X, reason: y, until: soon}]", "accepted.0.until"),
    ],
)
def test_a_faulty_file_of_rules_is_refused_by_entry(tmp_path, text, why):
    path = tmp_path / "audit.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=why):
        read_rules(path)


def answers(monkeypatch, stdout="", stderr=""):
    done = subprocess.CompletedProcess([], 0, stdout, stderr)
    monkeypatch.setattr(audit.subprocess, "run", lambda *_, **__: done)


def run(
    monkeypatch, tmp_path, lock="h11==0.15.0\n", floors="{h11: {version: 0.16.0, advisory: C}}"
):
    path = tmp_path / "audit.yaml"
    path.write_text(f"floors: {floors}\naccepted: []\n")
    monkeypatch.setattr(audit, "RULES", path)
    (tmp_path / "a.lock").write_text(lock)
    return audit.main([str(tmp_path / "a.lock")])


def test_without_a_network_it_says_so_and_goes_by_the_floors(monkeypatch, tmp_path, capsys):
    answers(monkeypatch, stderr="ConnectionError: no route\n")
    assert run(monkeypatch, tmp_path) == 1
    wrong = capsys.readouterr().err
    assert "pip-audit NOT done" in wrong and "no route" in wrong and "h11 0.15.0: C" in wrong
    assert run(monkeypatch, tmp_path, lock="h11==0.16.0\n") == 0
    assert "by the 1 floors of audit.yaml alone: 0 fault(s)" in capsys.readouterr().err


def test_with_a_network_pip_audits_findings_count(monkeypatch, tmp_path):
    answers(monkeypatch, json.dumps(report({"id": "PYSEC-1"})))
    assert run(monkeypatch, tmp_path, lock="h11==0.16.0\n") == 1
    answers(monkeypatch, json.dumps(report()))
    assert run(monkeypatch, tmp_path, lock="h11==0.16.0\n") == 0


def test_a_lock_that_is_not_there_fails(tmp_path, capsys):
    assert audit.main([str(tmp_path / "none.lock")]) == 1
    assert "none.lock" in capsys.readouterr().err


def test_the_locks_of_the_repository_are_above_the_floors():
    own = read_rules(audit.RULES)
    for lock in audit.ROOT.glob("requirements*.lock"):
        found = below_floors(pins(lock.read_text()), own)
        assert faults(found, own, TODAY) == [], lock.name

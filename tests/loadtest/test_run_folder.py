"""What a run leaves on disk, whatever ends it."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from kappa_loadtest.run_folder import (
    DECISIONS,
    OPTIONS,
    RECORDS,
    RUN,
    RequestDecision,
    RequestRecord,
    RunFolder,
    RunFolderError,
    locked,
    read_records,
    read_run,
)

OPTIONS_USED = {"workload": "w", "seed": 1}


def begun(folder: Path) -> RunFolder:
    return RunFolder.create(folder, {OPTIONS: OPTIONS_USED, "model": "m"})


def lines(folder: Path) -> list[RequestRecord]:
    return list(read_records(folder))


def keys(folder: Path) -> list[tuple[str, int]]:
    return [(record.session, record.turn) for record in lines(folder)]


def test_records_and_facts_are_on_disk_before_closing(
    tmp_path: Path,
) -> None:
    run_folder = begun(tmp_path / "run")
    record = RequestRecord("s", 2, "red", gaps_s=[0.1, 0.2], error="cut", predicted={"load_s": 1.0})
    run_folder.write(record)
    run_folder.note(interrupted=True)
    assert lines(tmp_path / "run") == [record]
    facts = {OPTIONS: OPTIONS_USED, "model": "m", "interrupted": True}
    assert json.loads((tmp_path / "run" / RUN).read_text()) == facts
    assert read_run(tmp_path / "run") == facts


def test_a_run_goes_on_after_its_last_whole_line(tmp_path: Path) -> None:
    run_folder = begun(tmp_path)
    run_folder.write(RequestRecord("a", 0, ended_s=3.0))
    run_folder.write(RequestRecord("a", 1, ended_s=5.0, error="429"))
    run_folder.write(RequestRecord("b", 0, ended_s=9.0, error="cancelled"))
    with (tmp_path / RECORDS).open("ab") as file:
        file.write(b'{"session":"c","tur')
    resumed = RunFolder.resume(tmp_path, OPTIONS_USED)
    # What was stopped is sent again; what failed was answered.
    assert (resumed.done, resumed.elapsed_s) == ({"a": 2}, 5.0)
    resumed.write(RequestRecord("b", 0))
    assert keys(tmp_path) == [("a", 0), ("a", 1), ("b", 0)]


def test_what_cannot_go_on_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    begun(tmp_path).write(RequestRecord("a", 0, error="cancelled"))
    with pytest.raises(RunFolderError, match="seed 1, not 2"):
        RunFolder.resume(tmp_path, {**OPTIONS_USED, "seed": 2})
    with pytest.raises(RunFolderError, match=f"--resume {tmp_path}"):
        begun(tmp_path)
    assert len(lines(tmp_path)) == 1


def test_a_folder_that_cannot_be_made_or_holds_no_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunFolderError, match=str(tmp_path / "file")):
        begun(tmp_path / "file")
    with pytest.raises(RunFolderError, match="holds no run"):
        RunFolder.resume(tmp_path, OPTIONS_USED)
    (tmp_path / RUN).write_text("{")
    with pytest.raises(RunFolderError, match=r"run\.json: not JSON"):
        RunFolder.resume(tmp_path, OPTIONS_USED)


@pytest.mark.parametrize(
    ("good", "name", "line", "why"),
    [
        (RequestRecord("a", 0), RECORDS, "{}", "not a record"),
        (RequestRecord("a", 0), RECORDS, '{"session":"s","turn":0,"x":1}', "unknown field `x`"),
        (RequestRecord("a", 0), RECORDS, "[", ""),
        (RequestDecision("r0", {}, {}), DECISIONS, '{"request_id":1}', ""),
    ],
)
def test_resume_names_a_damaged_line(
    tmp_path: Path, good: RequestRecord | RequestDecision, name: str, line: str, why: str
) -> None:
    begun(tmp_path).write(good)
    with (tmp_path / name).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(RunFolderError, match=rf"{name}:2: .*{why}"):
        RunFolder.resume(tmp_path, OPTIONS_USED)


def test_the_last_decision_of_a_request_is_found_on_its_record(tmp_path: Path) -> None:
    run_folder = begun(tmp_path)
    for number in range(3):
        run_folder.write(RequestRecord("s", number, request_id=f"r{number}"))
    run_folder.write(RequestDecision("r1", {"load_s": 1.0}, {"new_tokens": None}))
    run_folder.write(RequestDecision("r0", {"load_s": 2.0}, {"new_tokens": 5}))
    run_folder.write(RequestDecision("r1", {"load_s": 1.0}, {"new_tokens": 7}))
    run_folder.close()
    run_folder.close()
    assert [(record.predicted, record.actual) for record in lines(tmp_path)] == [
        ({"load_s": 2.0}, {"new_tokens": 5}), ({"load_s": 1.0}, {"new_tokens": 7}), (None, None),
    ]  # fmt: skip


def test_decisions_of_a_killed_run_are_kept_when_it_goes_on(tmp_path: Path) -> None:
    run_folder = begun(tmp_path)
    run_folder.write(RequestRecord("s", 0, request_id="r0"))
    run_folder.write(RequestDecision("r0", {}, {"new_tokens": 5}))
    with (tmp_path / DECISIONS).open("ab") as file:
        file.write(b'{"request_id":"r1"')
    resumed = RunFolder.resume(tmp_path, OPTIONS_USED)
    resumed.write(RequestRecord("s", 1, request_id="r1"))
    resumed.write(RequestDecision("r1", {}, {"new_tokens": 6}))
    assert [record.actual for record in lines(tmp_path)] == [{"new_tokens": 5}, {"new_tokens": 6}]


def test_half_a_line_on_a_full_disk_does_not_spoil_the_rest(tmp_path: Path) -> None:
    run_folder = begun(tmp_path)
    run_folder.write(RequestRecord("a", 0))
    size = (tmp_path / RECORDS).stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, hard))
    try:
        with pytest.raises(OSError, match="only 20 of"):
            run_folder.write(RequestRecord("b", 0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    run_folder.write(RequestRecord("c", 0))  # a stream that ends later, when there is room again
    assert keys(tmp_path) == [("a", 0), ("c", 0)]


def test_a_folder_is_for_one_run_at_a_time(tmp_path: Path) -> None:
    refused = pytest.raises(RunFolderError, match="another run is writing")
    with locked(tmp_path), refused, locked(tmp_path):
        pass
    with locked(tmp_path):
        pass
    with pytest.raises(RunFolderError, match="nowhere"), locked(tmp_path / "nowhere"):
        pass

"""The bench of load plans: one small run end to end, and what it refuses and leaves out."""

import json
import math

import pytest
import torch

from benchmarks.offload import __main__ as command
from benchmarks.offload.needs import GIB, needs
from benchmarks.offload.run import Options, run
from benchmarks.offload.settings import SETTINGS
from engine.arena import ArenaTooLarge
from engine.transfer import mover_for

COLUMNS = {
    "system", "model", "batch", "prompt", "gen", "policy", "latency_s", "tokens_per_s", "gpu_busy",
    "bytes_h2d", "gbps", "predicted_s", "baseline", "speedup", "latency_iqr_s", "repeats",
}  # fmt: skip


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    out = tmp_path_factory.mktemp("bench") / "deep" / "rows.json"
    done = run(["cpu-smallest"], Options(out=out))
    assert json.loads(out.read_text())["rows"] == json.loads(json.dumps(done["rows"]))
    return done


def rows(result, system):
    found = {row["policy"]: row for row in result["rows"] if row["system"] == system}
    assert found
    return found


def test_every_row_has_every_column_and_a_prediction(result):
    assert {"device", "date", "rows"} <= set(result)
    json.dumps(result, allow_nan=False)
    for row in result["rows"]:
        assert set(row) >= COLUMNS
        assert row["repeats"] == 5 and row["latency_s"] > 0 and row["latency_iqr_s"] >= 0
        assert row["predicted_s"] > 0
        assert row["predicted_error"] == pytest.approx(row["predicted_s"] / row["latency_s"] - 1)
        if row["policy"] == row["baseline"]:
            assert row["speedup"] == 1.0


def test_all_policies_generate_the_baselines_tokens(result):
    for row in result["rows"]:
        assert row["tokens_equal"] == (None if row["policy"] == "link-alone" else 1.0)


def test_a_decoding_row_counts_the_bytes_of_its_steps(result):
    # 2 sequences of 24 tokens in blocks of 8, 3 layers of width 64 in 4 bytes, 3 steps.
    found = rows(result, "decode-row")
    assert found["kv-only"]["bytes_h2d"] == 3 * 2 * 24 * 3 * 2 * 64 * 4
    activations = found["kvpr-ahead"]
    assert activations["tokens_per_s"] == pytest.approx(2 * 3 / activations["latency_s"])
    assert activations["end_to_end_tokens_per_s"] < activations["tokens_per_s"] * 4 / 3


def test_a_prefix_is_loaded_in_whole_or_not_at_all_as_its_plan_says(result):
    found = rows(result, "prefix-ttft")
    whole = 64 * 3 * 2 * 64 * 4
    for policy, share in (
        ("load-sequential", 1), ("load-layers", 1), ("recompute-all", 0), ("activations", 0.5),
    ):  # fmt: skip
        assert found[policy]["bytes_h2d"] == share * whole
    chosen = [policy for policy, row in found.items() if row["chosen"]]
    assert chosen == ["auto"]


def test_streamed_weights_cross_the_link_once_a_step(result):
    found = rows(result, "decode-column")
    cache = 3 * 4 * 24 * 3 * 2 * 64 * 4
    least = 12 * 64 * 64 * 4 * 3 * 3
    assert least < found["kv-only"]["bytes_h2d"] - cache < 1.1 * least


def test_goals_are_judged_and_say_where(result):
    goals = result["goals"]
    assert {goal["said"].split(" by ")[0] for goal in goals} <= {"met", "missed"}
    cells = {(row["system"], row["cell"]) for row in result["rows"]}
    named = [goal for goal in goals if "at most 3 % slower" in goal["goal"]]
    assert len(named) == len(cells) == 3
    assert goals[0]["rows"] <= len(result["rows"])


def test_a_machine_without_the_memory_is_refused_with_both_numbers(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ArenaTooLarge, match=r"41\.\d GiB of device memory .* 0\.0 GiB and"):
        run(["kvpr-6.7b"], Options())
    monkeypatch.setattr("benchmarks.offload.needs.free_host_bytes", lambda: 10 << 20)
    with pytest.raises(ArenaTooLarge, match=r"0\.2 GiB of host memory, .* 0\.0 GiB are free"):
        run(["cpu-small"], Options())


def test_settings_for_a_gpu_fit_the_machine_they_are_for():
    for setting in SETTINGS.values():
        if setting.is_sparse:
            continue
        for group in setting.groups:
            wanted = needs(setting, group)
            assert wanted.host_bytes < 100 * GIB
            assert wanted.device_bytes < (setting.cap_bytes or 130 * GIB)


@pytest.mark.parametrize(
    ("names", "options", "words"),
    [
        (["gpu-big"], {}, "no setting named 'gpu-big'"),
        (["cpu-smallest"], {"only": ("99x",)}, "no cell has any of 99x"),
        (["cpu-smallest", "ttft"], {}, "do not go together"),
        (["cpu-smallest"], {"repeats": 4}, "4 repeats say too little"),
    ],
)
def test_what_is_not_there_is_refused(names, options, words):
    with pytest.raises(ValueError, match=words):
        run(names, Options(**options))


def test_a_cell_that_would_exceed_the_limit_is_left_out():
    told = []
    done = run(["cpu-smallest"], Options(only=("64+8",), limit_s=1e-6), told.append)
    assert done["rows"] == [] and done["goals"] == []
    (one,) = done["left_out"][:1]
    assert one["what"] == "cpu-smallest opt-tiny 64+8" and "left of the limit" in one["why"]
    assert any("left out" in line for line in told)


def test_an_unsteady_machine_leaves_the_group_out_by_name(monkeypatch, capsys):
    def poor(measured):
        raise ValueError("the load fit has R² 0.4")

    monkeypatch.setattr("benchmarks.offload.rig.rates_from_measured", poor)
    monkeypatch.setattr("benchmarks.offload.rig.profile", lambda forward, settings: {})
    assert command.main(["--setting", "cpu-smallest", "--only", "column"]) == 1
    done = json.loads(capsys.readouterr().out)
    assert "R² 0.4" in done["left_out"][0]["why"] and not done["rows"]


def test_the_command_refuses_with_status_2(capsys):
    assert command.main(["--setting", "none"]) == 2
    assert "no setting named 'none'" in capsys.readouterr().err


def test_a_paced_link_takes_its_time():
    from benchmarks.offload.rig import metered_mover, settled

    target, source = torch.zeros(1000), torch.ones(1000)
    paced = metered_mover(torch.device("cpu"), 1e6)
    try:
        paced.h2d([(target, source)]).block()
        copied, seconds = settled(paced)
        # At least that long, whatever the machine does meanwhile.
        assert copied == 4000 and seconds >= 0.004
        before = paced.stalled_s()
        paced.wait(paced.h2d([(target, source)]))
        assert paced.stalled_s() > before and math.isfinite(paced.stalled_s())
    finally:
        paced.stop()
    assert type(mover_for("cpu")) is not type(paced)

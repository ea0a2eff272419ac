"""`kappa profile` prints what an engine measured, and what it could not."""

import copy

from kappa_deploy.commands.profile import _print

POINT = {"bytes_per_s": 1e9, "spread": 0.02, "seconds": 1e-3, "bytes": 1 << 20}
OWN = {"blocks": 8, "beside_bytes_per_s": 0.5e9}
ROW = {
    "node": "n", "paced": False, "profile_error": None, "measured_s_ago": 7200.0,
    "measured": {
        "device": "cpu", "threads": 1, "h2d": [POINT | OWN], "d2h": [POINT | OWN],
        "peaks": {"h2d_bytes_per_s": 9e9, "d2h_bytes_per_s": 8e9, "hbm_bytes_per_s": 2e10,
                  "flops_per_s": 5e10},
        "load_fixed_s": 1e-4, "store_fixed_s": 2e-4, "h2d_bytes_per_s": 1.1e9,
        "d2h_bytes_per_s": 1.2e9, "load_line_error": 0.04, "store_line_error": 0.05,
        "step": {"fixed_s": 2e-3, "token_s": 5e-5, "pair_s": 8e-9, "weights_s": 3e-3,
                 "context_token_s": 7e-8, "r2": 0.991, "steps": 40, "error": 0.03},
    },
}  # fmt: skip


def test_a_measured_engine_is_a_table_with_bars_and_sentences(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    _print(ROW)
    shown = capsys.readouterr().out
    assert "measured 2.0 h ago" in shown and "█" * 24 in shown
    assert "Peaks: copies 9.00 GB/s in, 8.00 GB/s out" in shown
    assert "A load takes 100 µs and its bytes at 1.10 GB/s" in shown and "up to 4%" in shown
    assert "A store takes 200 µs and its bytes at 1.20 GB/s" in shown
    assert "R² 0.991 over 40 steps, half of them within 3%" in shown


def test_a_machine_alone_has_no_sentences_of_an_engine(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    row = copy.deepcopy(ROW) | {"paced": True, "profile_error": "the step fit has R² 0.9"}
    for name in ("load_fixed_s", "step"):
        del row["measured"][name]
    row["measured"]["h2d"] = row["measured"]["d2h"] = [POINT]
    _print(row)
    shown = capsys.readouterr().out
    assert "the node is paced" in shown and "host to device" in shown
    assert "takes" not in shown and "Note: the step fit has R² 0.9." in shown


def test_what_was_not_measured_is_said(capsys):
    _print(ROW | {"measured": {}, "profile_error": "profile failed: boom"})
    assert capsys.readouterr().out == "n: profile failed: boom\n"

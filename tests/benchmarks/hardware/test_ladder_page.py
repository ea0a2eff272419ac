"""What the rows of the ladder say: the fit, a sentence each, pictures, the page."""

from __future__ import annotations

import pytest

from kappa_benchmarks.hardware.ladder_page import CPU_LABEL, page, pictures, predicted, sentences

COPY = {"kind": "copy", "way": "to the device, pageable", "layout": "whole", "bytes": 4096,
        "bytes_per_s": 2e9, "largest": True}  # fmt: skip


def cells(token_s, load_token_s, *, share=1.0, wait_s=0.0):
    """Of an engine with these constants; its TTFT has a wait that no constant explains."""
    rows = [{"kind": "engine", "arm": "vllm", "kv_bytes": 1000.0, "serial_share": share,
             "tier": "own"}]  # fmt: skip
    for cached in (1_000, 2_000, 4_000):
        for new in (10, 100, 1_000):
            load_s, compute_s = 0.001 + cached * load_token_s, 0.002 + new * token_s
            both = max(load_s, compute_s) + share * min(load_s, compute_s) + wait_s
            rows.append({
                "kind": "ttft", "arm": "vllm", "cached": cached, "new": new, "load_s": load_s,
                "compute_s": compute_s, "measured_s": both, "least_s": both, "most_s": both,
            })  # fmt: skip
    return rows


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_the_fit_finds_the_constants_that_the_rows_were_made_of(share):
    fit = predicted(cells(1e-4, 1e-6, share=share))[-1]
    assert fit["kind"] == "fit" and fit["kappa_crit"] == pytest.approx(100, rel=0.01)
    assert fit["load_bytes_per_s"] == pytest.approx(1e9, rel=0.01)
    assert fit["most_error"] < 0.01 and fit["step_r2"] > 0.999


def test_ttft_is_held_against_a_fit_that_did_not_see_it():
    rows = predicted(cells(1e-4, 1e-6, wait_s=1.0))
    # 1000 cached, 1000 new: 0.002 + 0.102 predicted, 1.104 measured.
    row = next(r for r in rows if (r.get("cached"), r.get("new")) == (1_000, 1_000))
    assert row["predicted_error"] == pytest.approx(0.104 / 1.104 - 1, abs=0.005)


def test_engine_ended_early_has_no_fit_and_keeps_its_rows():
    rows = predicted(cells(1e-4, 1e-6)[:3])
    assert [r["kind"] for r in rows] == ["engine", "ttft", "ttft", "unfitted"]
    assert "measure" in sentences(rows)[0]


def test_every_kind_of_row_is_told_and_drawn():
    rows = [
        COPY, {**COPY, "largest": False}, {"kind": "product", "tokens": 16, "flops_per_s": 3e12},
        {"kind": "compare", "arm": "torch", "tier": "own", "verdict": "equal", "cached_tokens": 64,
         "tokens": 72, "moved": 0.0, "noise": 1e-6, "control": 2.0},
        *predicted(cells(1e-4, 1e-6)),
        {"kind": "decode", "arm": "eager", "batch": 4, "step_s": 0.004, "between_tokens_s": 0.005},
        {"kind": "burst", "arm": "vllm", "loads": "none", "ttft_s": 0.25, "ttft_most_s": 0.5,
         "step_s": None, "step_most_s": None},
        {"kind": "policy", "arm": "KVPR", "system": "decode-row", "cell": "8x512/9", "model": "m",
         "policy": "kvpr-ahead", "baseline": "kv-only", "speedup": 1.5},
    ]  # fmt: skip
    told = sentences(rows)
    assert told == [
        "to the device, pageable, whole: 2 GB/s",
        "product of 16 tokens: 3 TFLOP/s",
        "torch (tier own): equal; 64 of 72 tokens found; log-probabilities moved by 0 (recomputed "
        "1e-06, another prompt 2)",
        "vllm: κ_crit 100, loads at 1 GB/s, TTFT predicted within 0% (median), 0% (most)",
        "eager, batch 4: step 4 ms, between tokens 5 ms",
        "vllm, loads none: TTFT 250 ms (longest 500 ms), step unknown (longest unknown)",
        "decode-row 8x512/9: kvpr-ahead 1.50 times kv-only",
    ]
    drawn = pictures("all", rows)
    assert len(drawn) == 3 and all(each.startswith("<svg") for each in drawn)
    shown = (
        ["copies, whole"],
        ["κ_crit 100"],
        ["decoding step, ms", "TTFT, median, ms", "kvpr-ahead"],
    )
    assert all(text in one for one, texts in zip(drawn, shown, strict=True) for text in texts)


def test_a_page_of_a_gpu_names_it_and_its_driver():
    facts = {"machine": {"gpus": [{"name": "H100", "driver": "580.65"}]}, "cuda": "13.0",
             "versions": {"vllm": "0.29.0"}}  # fmt: skip
    text = page({"facts": facts, "date": "2026-01-01", "device": "H100", "machine": "x",
                 "total_s": 5.0, "model": "random", "rungs": []})  # fmt: skip
    assert "H100 (driver 580.65)" in text and "vllm 0.29.0" in text and CPU_LABEL not in text

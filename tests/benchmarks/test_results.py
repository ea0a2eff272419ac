"""What was measured before is still printed: results keep the keys that documents quote."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from kappa_benchmarks.faults import command as faults
from kappa_benchmarks.hardware.ladder_page import page
from kappa_benchmarks.offload import run as offload
from kappa_benchmarks.routing import capacity, regret, router
from kappa_benchmarks.routing.peers import dynamo
from kappa_benchmarks.serving import predict, serve, validate


def show_faults(runs, console):
    for report in runs.values():
        faults.show(report, console)


def show_ladder(facts, console):
    console.print(page(facts), markup=False)


RESULTS = Path(__file__).parents[2] / "docs" / "results"
SHOWN = [
    ("2026-11-21-bench-predict.json", predict.show, "queue"),
    ("2026-11-23-bench-predict-real.json", predict.show, "median by length"),
    ("2026-11-23-bench-predict-real-learnt.json", predict.show, "queue +0.022"),
    ("2026-11-23-bench-predict-real-disk.json", predict.show, "queue +0.018"),
    ("2026-11-24-bench-predict.json", predict.show, "stores dropped: 0"),
    ("2026-11-24-bench-predict-real.json", predict.show, "stores dropped: 5"),
    ("2026-11-23-bench-predict-layers.json", predict.show, "load"),
    ("2026-11-23-bench-predict-arithmetic.json", predict.show, "queue"),
    ("2026-11-28-bench-serve.json", serve.show, "stock"),
    ("2026-11-28-bench-serve-after.json", serve.show, "direct"),
    ("2026-11-28-bench-serve-talks.json", serve.show, "32k follow-up"),
    ("2026-11-28-bench-serve-128k.json", serve.show, "128k follow-up"),
    ("2026-11-21-bench-validate.json", validate.show, "least_backlog"),
    ("2026-11-23-bench-dynamo-1000.json", dynamo.show, "two-tier"),
    ("2026-11-23-bench-dynamo-mooncake.json", dynamo.show, "two-tier"),
    ("2026-11-24-bench-dynamo-aiperf.json", dynamo.show, "two-tier"),
    ("2026-11-23-bench-capacity-peers.json", capacity.show, "priced / peer"),
    ("2026-11-23-bench-capacity-common.json", capacity.show, "ray_prefix"),
    ("2026-11-24-bench-capacity.json", capacity.show, "priced@fair"),
    ("2026-11-24-bench-regret.json", regret.show, "best plan"),
    ("2026-11-24-bench-predict-bounded.json", predict.show, "queue"),
    ("2026-11-22-bench-router.json", router.show, "131,072"),
    ("2026-11-24-bench-router.json", router.show, "131,072"),
    ("2026-11-24-bench-router-later.json", router.show, "131,072"),
    ("2026-11-21-faults-emulated.json", show_faults, "ingress_killed"),
    ("2026-11-23-ladder-smollm2-vllm.json", show_ladder, "κ_crit 40.2"),
    ("2026-11-24-ladder-smollm2-vllm.json", show_ladder, "κ_crit 525"),
    ("2026-11-21-bench-offload-cpu.json", offload.show, "kvpr-ahead"),
    ("2026-11-23-bench-offload-served.json", offload.show, "host-hybrid"),
    ("2026-11-23-bench-offload-sparse-answers.json", offload.show, "lru 1/16"),
    ("2026-11-23-bench-offload-sparse-seconds.json", offload.show, "clo 1/8"),
    ("2026-11-29-bench-offload-clo-loading.json", offload.show, "over loading"),
    ("2026-11-29-bench-offload-clo-parts.json", offload.show, "clo-tgp 1/8"),
]


@pytest.mark.parametrize(("name", "show", "word"), SHOWN, ids=[name for name, *_ in SHOWN])
def test_a_result_that_a_document_quotes_is_printed(name, show, word):
    text = io.StringIO()
    facts = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    show(facts, Console(file=text, width=200))
    assert word in text.getvalue()

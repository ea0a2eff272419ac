"""`kappa bench` refuses what it cannot use before anything runs, and names it."""

import pytest
from typer.testing import CliRunner

from kappa_deploy.cli import app

REFUSED = [
    ("capacity --trace nowhere", "nowhere"), ("capacity --trace azure --cluster x", "'x'"),
    ("capacity --trace azure --policies ttft@x", "x"),
    ("capacity --trace azure --policies x", "unknown policy 'x'"),
    ("capacity --trace azure --policies ,", "names none"),
    ("capacity --trace azure --attainment 0", "attainment"),
    ("overload --trace nowhere", "nowhere"), ("overload --cluster x", "'x'"),
    ("overload --loads x", "--loads"), ("overload --policy x", "unknown policy 'x'"),
    ("overload --seconds 0", "seconds"), ("overload --retry x", "retry"),
    ("overload --patience 0", "patience"),
    ("regret --policies nonesuch", "nonesuch"), ("regret --policies ;", "names none"),
    ("regret --trace nonesuch", "nonesuch"), ("regret --cluster nonesuch", "nonesuch"),
    ("router --policy magic", "magic"),
    ("scheduler --backend gpu", "--backend: unknown 'gpu': choose of vllm, simulator"),
    ("scheduler --policies fair,fifo", "--policies: unknown 'fifo': choose of fcfs, fcfs_link"),
    ("scheduler --workloads mixd", "--workloads: unknown 'mixd': choose of mixed, mixed10"),
    ("scheduler --links x2", "--links: unknown 'x2': choose of x0.25, x1, x4"),
    ("scheduler --stores half", "--stores: unknown 'half': choose of free, shared"),
    ("routing --policies nobody", "unknown policy 'nobody'"),
    ("routing --policies ttft,ttft", "named twice"),
    ("routing --policies dynamo:host_credit=x", "must be a number"),
    ("routing --cluster smal", "Did you mean 'small'"),
    ("routing --trace nowhere.jsonl", "no workload and no file"),
    ("routing --model gpt-9", "gpt-9"),
    ("routing --report", "run the grid into this directory first"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=[words for words, _ in REFUSED])
def test_bench_refuses_what_it_cannot_use(tmp_path, words, message):
    bench, *options = words.split()
    out = tmp_path / "out"
    more = ["--requests", "60", "--out", str(out)] if bench == "routing" else []
    done = CliRunner().invoke(app, ["bench", bench, *options, *more])
    assert done.exit_code == 2 and "Traceback" not in done.output
    assert message in " ".join(done.output.replace("│", " ").split())
    assert not out.exists()

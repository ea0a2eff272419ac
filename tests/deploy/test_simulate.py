"""`kappa simulate` from the outside: one object, the same each time; bad input exits with 2."""

import json

import pytest
from typer.testing import CliRunner

from kappa_deploy.cli import app

SMALL = ["simulate", "--cluster", "small", "--trace", "sharegpt", "--rate", "20", "--policy",
         "ttft", "--requests", "150"]  # fmt: skip


def invoke(*arguments):
    return CliRunner().invoke(app, [*arguments], env={"COLUMNS": "200"})


def test_one_object_with_the_figures_and_the_same_each_time():
    one, again = invoke(*SMALL, "--json"), invoke(*SMALL, "--json")
    assert one.exit_code == 0, one.stderr
    first, second = json.loads(one.stdout), json.loads(again.stdout)
    assert first["decision_us"].pop("p50") > 0 and second.pop("decision_us")
    first.pop("decision_us")
    assert first == second
    assert (first["policy"], first["scheduler"]) == ("ttft", "fcfs")
    assert (first["trace"], first["cluster"]) == ("sharegpt", "small")
    assert first["requests"] == first["completed"] + first["rejected"] == 120
    assert len(first["nodes"]) == 4


def test_for_people_it_prints_tables():
    done = invoke(*SMALL, "--scheduler", "vtc", "--cold", "--failures", "1", "--stragglers", "1",
                  "--misprofile", "both", "--admission")  # fmt: skip
    assert done.exit_code == 0, done.stderr
    assert "TTFT" in done.stdout and "gh200-0" in done.stdout and "goodput" in done.stdout


def test_what_a_table_of_silicon_does_not_reach_is_said(tmp_path):
    cluster = tmp_path / "silicon.yaml"
    cluster.write_text("- {kind: h100, count: 2, silicon: h100_sxm/llama-3.1-8b/tp1}\n")
    long = ("--trace", "finqa", "--requests", "60", "--rate", "0.5")
    done = invoke(*SMALL, *long, "--cluster", str(cluster), "--json")
    assert done.exit_code == 0, done.stderr
    assert "does not reach as far: attention of those that decode" in done.stderr
    assert json.loads(done.stdout)["completed"] > 0


def test_a_cap_slows_first_tokens_and_names_its_law():
    free, capped = (
        json.loads(done.stdout)
        for done in (invoke(*SMALL, "--json"), invoke(*SMALL, "--cap-w", "300", "--json"))
    )
    assert capped["ttft_s"]["mean"] > free["ttft_s"]["mean"]
    assert "emulated cap of 300 of 700 W: clock at 52%" in " ".join(capped["cap"])
    assert "cap" not in free


def test_several_routers_share_what_they_sent():
    done = invoke(*SMALL, "--routers", "2", "--share-s", "0.1", "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["completed"] == 120


def test_more_nodes_of_the_same_mix():
    done = invoke(*SMALL, "--nodes", "9", "--json")
    assert len(json.loads(done.stdout)["nodes"]) == 9


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cluster", "mixd"], ["'mixed'", "uniform"]),
        (["--trace", "narative"], ["narative", "narrativeqa"]),
        (["--policy", "magic"], ["magic", "ttft"]),
        (["--scheduler", "fairr"], ["'fair'", "fcfs"]),
        (["--share-s", "0.1"], ["one router", "--routers"]),
        (["--misprofile", "lnk"], ["'link'", "compute"]),
        (["--model", "llama-9"], ["llama-9", "llama-3.1-8b"]),
        (["--model", "llama-3.1-405b"], ["node gh200-0", "811.7 GB"]),
        (["--load", "0.5"], ["either load"]),
        (["--requests", "0"], ["requests is 0"]),
        (["--rate", "-1"], ["rate_rps is -1"]),
        (["--cap-w", "150"], ["150 W is not above the", "give more"]),
        (["--failures", "4"], ["leave at least one"]),
    ],
)
def test_bad_input_exits_with_two_and_says_what_to_do(arguments, words):
    done = invoke(*SMALL, *arguments, "--json")
    assert done.exit_code == 2
    assert all(word in done.stderr for word in words), done.stderr
    assert not done.stdout


def test_a_bad_cluster_file_and_a_truncated_trace_are_named(tmp_path):
    cluster = tmp_path / "slow.yaml"
    cluster.write_text("- {kind: h100, name: dead, h2d_bytes_per_s: 0}\n")
    done = invoke(*SMALL, "--cluster", str(cluster))
    assert done.exit_code == 2
    assert "dead" in done.stderr and "h2d_bytes_per_s" in done.stderr
    trace = tmp_path / "cut.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1')
    done = invoke(*SMALL, "--trace", str(trace), "--json")
    assert done.exit_code == 2 and "cut.jsonl:1" in done.stderr.replace("\n", "")
    assert not done.stdout

"""`kappa workload` from the outside: one object, tables, a picture; bad input exits with 2."""

import json

import pytest
import typer
from typer.testing import CliRunner

from kappa.cost import QUESTION_TOKENS, kappa_eff
from kappa.shapes import model_shape
from kappa_deploy.commands.workload import workload
from kappa_simulator.clusters import cluster_named

app = typer.Typer()
app.command()(workload)


def invoke(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200"})


def test_one_object_with_the_distributions_and_each_nodes_share():
    answer = invoke("sharegpt", "--cluster", "small", "--model", "llama-3.1-8b", "--json")
    assert answer.exit_code == 0, answer.stderr
    found = json.loads(answer.stdout)

    assert found["requests"] == 2118
    for key in ("new", "cached", "kappa"):
        assert list(found[key].values()) == sorted(found[key].values())
        assert list(found[key]) == ["p10", "p50", "p90", "p99"]
    nodes = {node.name: node.profile for node in cluster_named("small").nodes}
    assert list(found["share_above"]) == list(nodes)
    shape = model_shape("llama-3.1-8b")
    for name, profile in nodes.items():
        assert found["kappa_crit"][name] == kappa_eff(shape, profile, QUESTION_TOKENS)
        assert 0 < found["share_above"][name] < 1
    # The faster its link, the fewer requests wait for it.
    assert found["share_above"]["gh200-0"] < found["share_above"]["h100-0"]


def test_a_cluster_file_and_the_cut_talks(tmp_path):
    nodes = tmp_path / "mine.yaml"
    nodes.write_text("- {kind: h100, name: slow, h2d_bytes_per_s: 5.5e+9}\n- {kind: h100}\n")
    found = json.loads(invoke("sharegpt", "--as-cut", "--cluster", nodes, "--json").stdout)
    assert found["share_above"]["slow-0"] > 0.3 > found["share_above"]["h100-0"]
    assert found["cached"]["p99"] < 2500


def test_for_people_it_prints_the_papers_figures_beside_ours():
    answer = invoke("finqa")
    assert answer.exit_code == 0, answer.stderr
    for words in ("1,566 requests of 174 sessions", "kappa p50", "10,000", "memory-bound",
                  "blocks of 16, cold at first", "174 filings"):  # fmt: skip
        assert words in answer.stdout
    assert "paper" not in invoke("azure").stdout


def test_the_picture_is_a_png(tmp_path):
    path = tmp_path / "kappa.png"
    answer = invoke("miniswe", "--cluster", "small", "--plot", path, "--json")
    assert answer.exit_code == 0, answer.stderr
    assert json.loads(answer.stdout)["workload"] == "miniswe"
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing"], "no workload and no file 'nothing': give a path, or one of narrativeqa"),
        (["azure", "--cluster", "smal"], "no cluster named 'smal'. Did you mean 'small'?"),
        (["azure", "--model", "lama"], "lama"),
        (["azure", "--plot", "picture.svg"], "give a name that ends in .png"),
        (["azure", "--plot", "/nowhere/picture.png"], "No such file or directory"),
        (["azure", "--tokenizer", "/nowhere"], "no tokenizer there"),
        (["azure", "--limit", "0"], "--limit"),
        (["hf:talks"], "expected hf:OWNER/NAME"),
    ],
)
def test_bad_input_exits_with_two_and_says_what_to_do(arguments, words):
    answer = invoke(*arguments)
    assert answer.exit_code == 2
    assert " ".join(words.split()) in " ".join(answer.stderr.replace("│", " ").split())


def test_a_broken_file_is_named_with_its_line(tmp_path):
    path = tmp_path / "sessions.jsonl"
    path.write_text('{"session": "a", "t_s": 0, "input": "x", "output": "y"}\n{"session": 1}\n')
    answer = invoke(path)
    assert answer.exit_code == 2
    assert ":2: Expected `str`, got `int` - at `$.session`" in answer.stderr.replace("\n│ ", "")

"""The command line's edges: help, wrong settings, a port that is taken. No cluster is started."""

import json
import shutil
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
import typer
from structlog.testing import capture_logs
from typer.testing import CliRunner

from kappa.host import COMMANDS, free_port, installed
from kappa.model_config import shape_from_config
from kappa.settings.cluster import load_settings
from kappa.settings.pools import ModelSettings
from kappa_deploy.app.model import (
    PreflightError,
    StartError,
    _by_transformers,
    _made_here,
    _read,
    model_here,
    prepare_model,
)
from kappa_deploy.app.plan import pool_config, pool_nodes
from kappa_deploy.app.ray_cluster import check_port
from kappa_deploy.cli import _COMMANDS, app, summary
from kappa_deploy.commands.serve import settings_or_exit, with_a_model
from kappa_workers.tiny_model import make_tiny_model
from tests.deploy.adapters import make_adapter


def test_help_names_every_command():
    done = CliRunner().invoke(app, ["--help"])
    assert done.exit_code == 0
    for command in ("serve", "demo", "profile", "tables", "explain", "bench"):
        assert command in done.stdout


def test_help_says_of_every_command_what_its_own_help_says_first():
    group = typer.main.get_command(app)
    context = group.make_context("kappa", ["tables"])
    entries = {**_COMMANDS, **installed(COMMANDS)}
    assert list(entries) == group.list_commands(context)
    for name, entry in entries.items():
        own = group.get_command(context, name).help
        assert own and summary(entry) == own.partition("\n\n")[0], name


def run_without(packages, *arguments):
    """`kappa ARGUMENTS` in a process of its own, in which these packages cannot be imported."""
    program = f"""
import sys
sys.modules.update(dict.fromkeys({packages!r}))
from kappa_deploy.cli import app
app({list(arguments)!r}, prog_name="kappa")
"""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


_HELP = """
import sys
from kappa_deploy.cli import app
try:
    app(["--help"])
finally:
    print(sorted({"numpy", "httpx", "ray"} & set(sys.modules)))
"""


def test_no_command_is_imported_before_it_is_used():
    done = subprocess.run([sys.executable, "-c", _HELP], capture_output=True, text=True, check=True)
    assert "bench" in done.stdout and done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "lacks", "extra"),
    [
        (("serve", "--port", "0"), "ray", "serve"),  # imported when the command runs
        (("dashboards",), "psutil", "serve"),  # imported with the command's file
        (("roofline",), "matplotlib", "loadtest"),
        (("simulate", "--trace", "miniswe"), "polars", "loadtest"),
        (("faults", "--no-such-option"), "psutil", "serve"),
    ],
)
def test_command_without_its_packages_names_the_extra(arguments, lacks, extra):
    done = run_without((lacks,), *arguments)
    assert done.returncode == 1
    remedy = f"needs {lacks}: pip install 'kappa-serve[{extra}]'"
    assert done.stderr == f"kappa {arguments[0]}: {remedy}\n"


def test_help_lists_a_command_whose_packages_are_missing():
    done = run_without(("psutil",), "--help")
    assert done.returncode == 0 and "serve" in done.stdout
    assert "'kappa-serve[serve]'" in " ".join(done.stdout.replace("│", " ").split())


def test_a_module_that_no_extra_brings_is_an_error_as_it_is():
    done = run_without(("yaml",), "keys", "new", "acme")
    assert done.returncode == 1 and "ModuleNotFoundError" in done.stderr


@pytest.mark.parametrize("command", ["serve", "demo"])
def test_wrong_settings_exit_with_two_and_name_the_key(command, tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text("router: {policy: magic}\n")
    done = CliRunner().invoke(app, [command, "--config", str(config)])
    assert done.exit_code == 2
    assert "router.policy" in done.stderr and "c.yaml" in done.stderr.replace("\n", "")


def test_a_wrong_policy_on_the_command_line_exits_with_two():
    done = CliRunner().invoke(app, ["serve", "--policy", "magic"])
    assert done.exit_code == 2 and "router.policy" in done.stderr


def test_a_taken_port_is_refused_with_a_remedy():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=f"127.0.0.1:{port}.*--port"):
            check_port("127.0.0.1", port)
    check_port("127.0.0.1", free_port("127.0.0.1"))


def test_a_taken_port_is_refused_before_a_model_is_fetched(tmp_path, monkeypatch):
    monkeypatch.setenv("KAPPA_HOME", str(tmp_path))
    monkeypatch.setattr("kappa_deploy.commands.serve.signal.signal", lambda *_: None)
    monkeypatch.setattr("kappa_deploy.app.smollm2.smollm2", lambda *_: pytest.fail("fetched"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = CliRunner().invoke(app, ["serve", "--port", str(taken.getsockname()[1])])
    assert done.exit_code == 1 and "Address already in use" in done.stderr
    assert "choose another port with --port" in " ".join(done.stderr.split())


def test_serve_exits_with_2_and_names_every_fault(tmp_path, monkeypatch):
    monkeypatch.setattr("kappa_deploy.commands.serve.signal.signal", lambda *_: None)
    config = tmp_path / "c.yaml"
    config.write_text(
        f"model: {{id: m, source: {tmp_path}/none}}\n"
        "pools: [{name: a, profile: h100-pcie5, placement: {gpus: 64}}]\n"
    )
    done = CliRunner().invoke(app, ["serve", "--config", str(config), "--port", "0"])
    assert done.exit_code == 2
    assert "none' is not there" in done.stderr and "of 64" in done.stderr


def test_a_model_that_is_not_there_is_a_start_error(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    settings = load_settings().model_copy(
        update={"model": ModelSettings(source=str(tmp_path / "none"))}
    )
    with pytest.raises(StartError, match=r"model\.source"):
        prepare_model(settings)


def test_nodes_are_paced_or_priors():
    settings = load_settings()
    paced, unpaced = (
        [node for pool in each.all_pools for node in pool_nodes(each, pool)]
        for each in (settings, settings.unpaced())
    )
    assert {(n.source, n.dilation) for n in paced} == {("paced", settings.dilation)}
    assert {(n.source, n.dilation) for n in unpaced} == {("catalogue", 1.0)}
    assert [n.name for n in paced] == [n.name for n in unpaced] == ["pcie", "c2c"]


def test_node_of_silicon_has_the_tables_gpus_and_its_own_link():
    table = "h100_sxm/llama-3.1-70b/tp4"
    nodes = [{"name": "a", "profile": "gh200-c2c", "silicon": table}]
    settings = load_settings(nodes=nodes, model={"emulate": "llama-3.1-70b"})
    (node,) = pool_nodes(settings, settings.all_pools[0])
    assert (node.silicon, node.gpus, node.gpu) == (table, 4, "H100-SXM5-80GB")
    # Four GPUs of the profile's link each, as `placement.gpus` would have it.
    assert node.h2d_bytes_per_s == 4 * 342e9
    assert (node.source, node.dilation) == ("paced", settings.dilation)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The tiny model's folder, and its config."""
    folder = make_tiny_model(tmp_path_factory.mktemp("m") / "tiny", ["a few words of text"])
    return folder, json.loads((folder / "config.json").read_text())


def model_of(tiny, folder, change, **engine):
    """The model that a cluster finds in a copy of the tiny one with another config."""
    shutil.copytree(tiny[0], folder)
    text = change if isinstance(change, str) else json.dumps({**tiny[1], **change})
    (folder / "config.json").write_text(text)
    return model_here(load_settings(model={"source": str(folder)}, engine=engine))


def with_adapter(tiny, folder):
    return load_settings(model={"source": str(tiny[0]), "adapters": {"fine": str(folder)}})


def test_adapter_rank_is_rounded_up_to_one_that_vllm_has(tiny, tmp_path):
    folder = make_adapter(tmp_path / "fine", tiny[0], rank=9)
    settings = with_adapter(tiny, folder)
    found = model_here(settings)
    assert found.adapter_rank == 9
    config = pool_config(settings, settings.all_pools[0], found)
    given = config["engine_kwargs"]
    assert given["enable_lora"] is True and given["max_lora_rank"] == 16
    assert (given["max_loras"], given["max_cpu_loras"]) == (1, 1)
    assert [(each.name, each.path) for each in given["lora_modules"]] == [("fine", str(folder))]
    plain = pool_config(load_settings(), settings.all_pools[0], found)["engine_kwargs"]
    assert not any("lora" in name for name in plain)


def test_adapter_missing_or_of_another_model_is_refused_by_name(tiny, tmp_path):
    with pytest.raises(PreflightError, match=r"model\.adapters: fine in .*none cannot be read"):
        model_here(with_adapter(tiny, tmp_path / "none"))
    folder = make_adapter(tmp_path / "wide", tiny[0], hidden=128)
    with pytest.raises(
        PreflightError, match=r"another model .* layers are 128 wide, the model's 64"
    ):
        model_here(with_adapter(tiny, folder))
    with pytest.raises(PreflightError, match="128 wide"):
        prepare_model(with_adapter(tiny, folder))
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(PreflightError, match="cannot be read: 'r'"):
        model_here(with_adapter(tiny, folder))


@pytest.mark.parametrize(("base", "lines"), [("org/Other-7B", 1), ("/mirror/{same}", 0), (None, 0)])
def test_adapter_that_fits_a_base_of_another_name_is_logged(tiny, tmp_path, base, lines):
    folder = make_adapter(tmp_path / "fine", tiny[0])
    facts = json.loads((folder / "adapter_config.json").read_text())
    facts["base_model_name_or_path"] = base and base.format(same=tiny[0].name.upper())
    (folder / "adapter_config.json").write_text(json.dumps(facts))
    with capture_logs() as logged:
        model_here(with_adapter(tiny, folder))
    found = [line for line in logged if line["event"] == "adapter_base"]
    assert len(found) == lines
    assert all((line["made_for"], line["model"]) == (base, str(tiny[0])) for line in found)


def test_a_model_that_we_wrote_is_read_as_transformers_reads_it(tiny):
    ways = _made_here(tiny[0]), _by_transformers(str(tiny[0]), is_offline=True)
    ours, theirs = (_read(str(tiny[0]), load_settings(), found) for found in ways)
    assert ours == theirs and ours.chat_template


def test_tiny_models_parameters_are_counted_as_stored(tiny, tmp_path):
    found = model_of(tiny, tmp_path / "m", {})
    assert found.shape.params_total == shape_from_config(tiny[1]).params_total


def test_unknown_model_family_is_served_with_a_line_in_the_log(tiny, tmp_path):
    with capture_logs() as logged:
        found = model_of(tiny, tmp_path / "m", {"model_type": "nobodys", "architectures": ["No"]})
    assert (found.shape.layers, found.no_weights) == (tiny[1]["num_hidden_layers"], "")
    (line,) = [line for line in logged if line["event"] == "model_family"]
    assert "'nobodys' is not listed" in line["note"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_hidden_layers": "many"}, "'num_hidden_layers' expected int"),
        ({"model_type": "nobodys", "vocab_size": None}, "key 'vocab_size' is missing"),
        ("{", ""),
    ],
)
def test_a_config_that_cannot_be_read_is_one_line(tiny, tmp_path, change, says):
    with pytest.raises(PreflightError) as caught:
        model_of(tiny, tmp_path / "m", change)
    message = str(caught.value)
    assert message.startswith(f"model.source '{tmp_path / 'm'}' cannot be loaded: ")
    assert says in message and "\n" not in message


def test_eight_bits_that_the_engine_is_to_use_are_in_the_prior(tiny, tmp_path):
    extra = {"quantization": "fp8", "kv_cache_dtype": "fp8_e5m2"}
    shape = model_of(tiny, tmp_path / "m", {}, extra=extra, dtype="bfloat16").shape
    assert (shape.weight_dtype_bytes, shape.kv_dtype_bytes) == (1, 1)
    stored = {"quantization_config": {"quant_method": "fp8"}}
    shape = model_of(tiny, tmp_path / "n", stored, dtype="bfloat16").shape
    assert (shape.weight_dtype_bytes, shape.kv_dtype_bytes) == (1, 2)


def test_serve_uses_a_real_model_and_with_paced_the_tiny_one(monkeypatch, tmp_path):
    monkeypatch.setenv("KAPPA_HOME", str(tmp_path))
    monkeypatch.setattr(
        "kappa_deploy.commands.serve.print_dry_run", lambda settings, *_: shown(settings)
    )
    seen = []

    def shown(settings):
        seen.append((settings.model.source, [(p.name, p.paced) for p in settings.all_pools]))
        return 0

    for options in ([], ["--unpaced"], ["--paced"]):
        assert CliRunner().invoke(app, ["serve", "--dry-run", *options]).exit_code == 0
    real = ("smollm2-135m", [("memory", False), ("disk", False)])
    assert seen == [real, real, (None, [("pcie", True), ("c2c", True)])]
    assert (tmp_path / "disk").is_dir()
    file = tmp_path / "cluster.yaml"
    file.write_text("nodes: [{name: a, profile: pcie}]\n")
    done = CliRunner().invoke(app, ["serve", "--paced", "--config", str(file)])
    assert done.exit_code == 2 and "say paced: true" in done.stderr


def test_serve_falls_back_to_the_tiny_model_without_the_wheel(monkeypatch, capsys):
    def refused(*_):
        raise StartError("smollm2-135m cannot be fetched: no index")

    monkeypatch.setattr("kappa_deploy.app.smollm2.smollm2", refused)
    settings = load_settings(
        model={"id": "smollm2-135m", "source": "smollm2-135m"},
        pools=[{"name": "memory", "profile": "pcie"}],
    )
    served = with_a_model(settings)
    assert (served.model.id, served.model.source) == ("kappa-tiny", None)
    assert served.all_pools == settings.all_pools
    said = " ".join(capsys.readouterr().err.split())
    assert "cannot be fetched: no index" in said and "mean nothing" in said
    monkeypatch.setattr("kappa_deploy.app.smollm2.smollm2", lambda *_: None)
    assert with_a_model(settings) == settings


def test_serve_omits_the_disk_tier_when_its_folder_is_unusable(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("KAPPA_HOME", str(tmp_path))
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10**9))
    (pool, other) = settings_or_exit(defaults=True).all_pools
    assert (pool.name, other.name) == ("memory", "memory-2")
    assert "1.0 GB free" in capsys.readouterr().err
    (tmp_path / "file").touch()
    monkeypatch.setenv("KAPPA_HOME", str(tmp_path / "file"))
    assert settings_or_exit(defaults=True).all_pools[1].name == "memory-2"
    assert "set KAPPA_HOME" in capsys.readouterr().err

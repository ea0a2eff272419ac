"""Settings of a cluster: the demo by default, and every fault with its file and key."""

import re
from pathlib import Path

import pytest
import yaml

from kappa.keys import digest_of, hashed
from kappa.protocol import MAX_TENANTS
from kappa.settings.base import SettingsError
from kappa.settings.cluster import ClusterSettings, home, load_settings
from kappa.settings.pools import PoolSettings, ScalingSettings
from tests.kappa.settings.faults import fault, named


@pytest.fixture
def written(tmp_path):
    def write(text):
        path = tmp_path / "cluster.yaml"
        path.write_text(text)
        return path

    return write


def test_the_defaults_are_two_unlike_paced_nodes():
    settings = load_settings()
    assert [node.name for node in settings.nodes] == ["pcie", "c2c"]
    assert all(node.paced for node in settings.nodes)
    assert settings.router.policy == "priced"
    assert settings.http.host == "127.0.0.1"
    assert settings == ClusterSettings()


def test_default_device_cache_is_smaller_than_the_demo_sessions():
    engine = load_settings().engine.on(gpus=0)
    # The sessions that ship end at 27 thousand tokens in all, spread over two nodes.
    assert 2 * engine.device_blocks * engine.block_tokens < 27_000
    assert engine.max_context_tokens >= 6_000, "the longest of them must fit"


def test_a_file_changes_what_it_names_and_nothing_else(written):
    path = written("dilation: 5\nrouter:\n  policy: threshold\n")
    settings = load_settings(path)
    assert (settings.dilation, settings.router.policy) == (5, "threshold")
    assert settings.router.max_queue == ClusterSettings().router.max_queue
    assert settings.engine == ClusterSettings().engine


def test_overrides_win_over_the_file(written):
    assert load_settings(written("dilation: 5\n"), dilation=7.0).dilation == 7.0


def test_an_empty_file_is_the_demo(written):
    assert load_settings(written("")) == ClusterSettings()


@pytest.mark.parametrize(
    ("text", "key", "says"),
    [
        ("dilatoin: 3", "dilatoin", "not permitted"),
        ("dilation: fast", "dilation", "number"),
        ("log_level: LOUD", "log_level", "DEBUG"),
        ("model: {emulate: gpt-9}", "model.emulate", "gpt-9"),
        ("model: {name: x}", "model.name", "not permitted"),
        ("nodes: []", "nodes", "at least one node"),
        ("nodes: [{name: a, profile: warp}]", "nodes.0.profile", "warp"),
        ("nodes: [{name: a, profile: missing.json}]", "nodes.0.profile", "missing.json"),
        ("nodes: [{profile: pcie}]", "nodes.0.name", "required"),
        ("nodes: [{name: a, profile: pcie}, {name: a, profile: c2c}]", "nodes", "must differ"),
        ("router: {policy: magic}", "router.policy", "threshold"),
        ("scheduler: {name: lifo}", "scheduler.name", "fair"),
        ("scheduler: {slack_s: .nan}", "scheduler.slack_s", "finite"),
        ("scheduler: {credit: .inf}", "scheduler.credit", "finite"),
        ("scheduler: {duplex: quarter}", "scheduler.duplex", "half"),
        ("scheduler: {link_order: lifo}", "scheduler.link_order", "loads_first"),
        ("scheduler: {log: ' '}", "scheduler.log", "name a file"),
        ("tenants: {weights: {default: 0}}", "tenants.weights.default", "greater than 0"),
        ("tenants: {weights: {default: .inf}}", "tenants.weights.default", "finite"),
        ("tenants: {weights: {alcie: 2}}", "tenants", "['alcie'], who have no key"),
        ("tenants: {unknown: refuse}", "tenants", "needs keys"),
        ("tenants: {unknown: perhaps}", "tenants.unknown", "refuse"),
        ("tenants: {default_name: 'a b'}", "tenants.default_name", "pattern"),
        ("tenants: {keys_file: nowhere.yaml}", "tenants", "nowhere.yaml: cannot be read"),
        ("tenants: {by_key: [sk-hush-01234567]}", "tenants.by_key", "dictionary"),
    ],
)
def test_each_fault_is_named_with_file_key_and_reason(written, text, key, says):
    path = written(text)
    message = fault(path)
    assert str(path) in message and named(message, key, says)


def test_all_faults_are_named_at_once(written):
    message = fault(written("dilation: 0\nhttp: {port: -1}\nextra: 1\n"))
    assert "3 fault(s)" in message
    assert all(f"  {key}:" in message for key in ("dilation", "http.port", "extra"))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"engine: [1, 2\n", "is not YAML"),
        (b"\xff\xfe\x00binary", ""),
        *((text, "expected a mapping") for text in (b"- a\n- b\n", b"7\n", b"text\n")),
    ],
)
def test_load_settings_names_a_file_that_holds_none(tmp_path, content, says):
    path = tmp_path / "cluster.yaml"
    if content is not None:
        path.write_bytes(content)
    message = fault(path)
    assert says in message and str(path) in message


def test_faults_in_overrides_name_the_defaults():
    assert "built-in defaults" in fault(dilation=-1.0)


def test_unpaced_changes_the_nodes_only():
    settings = load_settings()
    unpaced = settings.unpaced()
    assert not any(node.paced for node in unpaced.nodes)
    assert unpaced.model_copy(update={"nodes": settings.nodes}) == settings


def test_home_follows_its_variable(monkeypatch):
    monkeypatch.setenv("KAPPA_HOME", "/somewhere")
    assert home() == Path("/somewhere")
    monkeypatch.delenv("KAPPA_HOME")
    assert home() == Path.home() / ".cache" / "kappa-serve"


def test_without_keys_there_is_one_tenant_and_nobody_is_refused():
    tenants = load_settings().tenants
    assert (tenants.by_key, tenants.unknown, tenants.default_name) == ({}, "default", "default")
    assert tenants.weight("default") == 1.0 and tenants.fixed_digests == frozenset()


def test_keys_come_from_the_settings_or_from_a_file_of_their_own(written, tmp_path):
    more = tmp_path / "keys.yaml"
    more.write_text(
        f"sk-b-0123456789a: bob\n{hashed('sk-b2-0123456789')}: bob\nsk-a-0123456789a: alice\n"
    )
    tenants = load_settings(
        written(
            "tenants: {by_key: {sk-a-0123456789a: alice}, weights: {bob: 2}, "
            f"keys_file: {more}}}"
        )
    ).tenants
    a, b, b2 = map(digest_of, ("sk-a-0123456789a", "sk-b-0123456789a", "sk-b2-0123456789"))
    assert tenants.digests == {a: "alice", b: "bob", b2: "bob"}
    assert tenants.fixed_digests == {a}
    assert (tenants.keys_in_clear, tenants.weight("bob")) == (2, 2.0)


def test_key_given_to_two_tenants_is_refused_across_its_places(written, tmp_path):
    more = tmp_path / "keys.yaml"
    more.write_text("sk-hush-01234567: bob\n")
    message = fault(written(f"tenants: {{by_key: {{sk-hush-01234567: alice}}, keys_file: {more}}}"))
    assert "one key to two tenants" in message and "hush" not in message


def test_a_broken_settings_file_is_named_without_its_keys(written):
    message = fault(written("tenants:\n  by_key:\n    sk-hush-01234567: alice: bob\n"))
    assert "is not YAML: mapping values are not allowed here, line 3 column" in message
    assert "hush" not in message


def test_settings_show_no_key():
    settings = load_settings(None, tenants={"by_key": {"sk-hush-01234567": "alice"}})
    shown = (repr(settings), str(settings), settings.model_dump_json(), str(settings.model_dump()))
    assert not any("hush" in text for text in shown)


def test_more_tenants_than_are_kept_apart_are_refused():
    by_key = {f"sk-{i:013}": f"t{i}" for i in range(MAX_TENANTS)}
    assert f"at most {MAX_TENANTS}" in fault(tenants={"by_key": by_key})


def test_an_engine_can_be_given_by_its_kind_alone(written):
    assert load_settings(written("engine: torch\n")).engine.kind == "torch"
    settings = load_settings(written("engine: {kind: torch, planner: kvpr, act_share: 0.5}\n"))
    assert (settings.engine.planner, settings.engine.act_share) == ("kvpr", 0.5)
    with pytest.raises(SettingsError, match="'vllm', 'torch'"):
        load_settings(written("engine: sglang\n"))


_DOCS = Path(__file__).parents[3] / "docs"


def yaml_of(page, heading):
    """The YAML blocks below a heading of a page in docs/, parsed."""
    text = (_DOCS / page).read_text().split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]


def test_cluster_file_page_documents_every_default():
    cluster, pool, scaling = yaml_of("cluster-file.md", "Defaults")
    assert ClusterSettings().model_dump(mode="json") == cluster
    made = PoolSettings(name="a", profile="pcie").model_dump(mode="json")
    assert made == {"name": "a", "profile": "pcie", **pool}
    assert ScalingSettings(max_replicas=4).model_dump() == {"max_replicas": 4, **scaling}


def test_the_pages_of_the_sections_name_the_same_defaults():
    cluster, *_ = yaml_of("cluster-file.md", "Defaults")
    (failover,) = yaml_of("failover.md", "Circuit breakers")
    assert failover["router"].items() <= cluster["router"].items()
    (scheduler,) = yaml_of("scheduling.md", "Settings")
    assert scheduler["scheduler"] == {**cluster["scheduler"], "log": "iterations.jsonl"}


def section_fault(path, value):
    """The error of a cluster with the setting `path` (a.b.c) at `value`; "" if it is taken."""
    for key in reversed(path.split(".")):
        value = {key: value}
    try:
        load_settings(**value)
    except SettingsError as error:
        return str(error)
    return ""


# The least that is taken and the first that is not, on either side; None: no bound there.
BOUNDS = [
    ("model.seed", (0, -1), None),
    ("dilation", (1, 0.99), None),
    ("engine.lmcache.timeout_s", (0.001, 0), (300, 301)),
    ("engine.lmcache.heartbeat_s", (0.001, 0), (60, 61)),
    ("engine.lmcache.retry_s", (0.001, 0), (600, 601)),
    ("engine.act_share", (0, -0.01), (1, 1.01)),
    ("engine.act_device_blocks", (0, -1), None),
    ("engine.cpu_room_share", (0, -0.01), (1, 1.01)),
    ("engine.sparse.share", (0.001, 0), (1, 1.01)),
    ("engine.sparse.sink_tokens", (0, -1), (1024, 1025)),
    ("engine.sparse.recent_tokens", (1, 0), (65536, 65537)),
    ("engine.sparse.eta", (-1, -1.01), (1, 1.01)),
    ("engine.sparse.power", (0.001, 0), (100, 100.5)),
    ("engine.sparse.epsilon", (0, -0.01), (2, 2.01)),
    ("engine.sparse.code_bits", (64, 0), (4096, 4160)),
    ("engine.sparse.max_age", (0, -1), None),
    ("engine.sparse.lanes", (1, 0), (4096, 4097)),
    ("engine.sparse.chunk_tokens", (1, 0), (4096, 4097)),
    ("engine.sparse.persistent_heads", (0, -1), None),
    ("engine.max_context_tokens", (64, 63), None),
    ("engine.host_bytes", (0, -1), None),
    ("engine.max_batch_tokens", (64, 63), None),
    ("engine.max_sequences", (1, 0), None),
    ("router.index_blocks", (1, 0), None),
    ("router.max_body_bytes", (1024, 1023), None),
    ("router.max_queue", (1, 0), None),
    ("router.stale_after_s", (0.001, 0), None),
    ("router.calibrate_requests", (0, -1), None),
    ("router.forecast_workers", (0, -1), None),
    ("router.request_timeout_s", (0.001, 0), None),
    ("router.failover.stall_after_s", (0.001, 0), None),
    ("router.failover.failures", (1, 0), None),
    ("router.failover.pause_s", (0.001, 0), (30, 30.1)),
    ("router.failover.longest_pause_s", (1, 0.9), None),
    ("scheduler.max_skips", (0, -1), None),
    ("scheduler.due_after_s", (0, -1), None),
    ("scheduler.window", (1, 0), (65536, 65537)),
    ("scheduler.slack_s", (0, -0.01), None),
    ("scheduler.credit", (0, -0.01), None),
    ("scheduler.store_backlog_s", (0, -1), None),
    ("transfer.wait_s", (0.001, 0), None),
    ("transfer.net_bytes_per_s", (0.001, 0), None),
    ("transfer.fixed_s", (0, -0.01), None),
    ("transfer.min_new_tokens", (1, 0), None),
    ("tenants.keys_check_s", (0.001, 0), (3600, 3601)),
    ("tenants.default_limits.requests_per_minute", (0.001, 0), None),
    ("tenants.default_limits.tokens_per_minute", (0.001, 0), None),
    ("tenants.default_limits.concurrent", (1, 0), None),
    ("access.max_headers", (16, 15), (10000, 10001)),
    ("access.max_header_bytes", (4096, 4095), None),
    ("access.body_timeout_s", (0.001, 0), None),
    ("http.port", (0, -1), (65535, 65536)),
    ("http.replicas", (1, 0), (64, 65)),
    ("observing.trace_share", (0, -0.01), (1, 1.01)),
]


@pytest.mark.parametrize(("path", "low", "high"), BOUNDS, ids=[path for path, *_ in BOUNDS])
def test_section_takes_a_number_up_to_its_bound_only(path, low, high):
    for taken, refused in filter(None, (low, high)):
        assert section_fault(path, taken) == ""
        assert path.rsplit(".", 1)[-1] in section_fault(path, refused)


def test_device_cache_must_hold_a_context_beside_an_unused_block():
    # 64 tokens are four blocks of 16; a cache of eight has seven to give: 112 tokens.
    engine = {"block_tokens": 16, "device_blocks": 8}
    assert load_settings(engine={**engine, "max_context_tokens": 112}).engine.device_blocks == 8
    with pytest.raises(SettingsError, match="holds 112 tokens, less than max_context_tokens = 113"):
        load_settings(engine={**engine, "max_context_tokens": 113})
    small = {"block_tokens": 16, "device_blocks": 7, "max_context_tokens": 64}
    with pytest.raises(SettingsError, match="device_blocks"):
        load_settings(engine=small)
    with pytest.raises(SettingsError, match="block_tokens"):
        load_settings(engine={"block_tokens": 15, "max_context_tokens": 64})


@pytest.mark.parametrize(
    ("section", "taken", "refused"),
    [
        ({}, {"drain_s": 0.001}, {"drain_s": 0}),
        ({}, {"replicas": 1}, {"replicas": 0}),
        ({}, {"cost_per_hour": 0.001}, {"cost_per_hour": 0}),
        ({}, {"placement": {"cpus": 0.1}}, {"placement": {"cpus": 0.09}}),
        ({}, {"placement": {"gpus": 0}}, {"placement": {"gpus": -1}}),
        ({}, {"placement": {"resources": {"a": 0.001}}}, {"placement": {"resources": {"a": 0}}}),
        ({"max_replicas": 1}, {"min_replicas": 1}, {"min_replicas": 0}),
        ({"min_replicas": 3}, {"max_replicas": 3}, {"max_replicas": 2}),
        ({"max_replicas": 1}, {"target_backlog_s": 0.001}, {"target_backlog_s": 0}),
        ({"max_replicas": 1}, {"target_utilisation": 0.001}, {"target_utilisation": 0}),
        ({"max_replicas": 1}, {"target_utilisation": 1}, {"target_utilisation": 1.01}),
        ({"max_replicas": 1}, {"up_after_s": 0}, {"up_after_s": -1}),
        ({"max_replicas": 1}, {"down_after_s": 0}, {"down_after_s": -1}),
    ],
)
def test_pool_takes_a_number_up_to_its_bound_only(section, taken, refused):
    def pool(given):
        inside = {"autoscaling": {**section, **given}} if section else given
        return load_settings(pools=[{"name": "a", "profile": "pcie", **inside}])

    assert pool(taken).pools[0].name == "a"
    with pytest.raises(SettingsError, match=next(iter(refused))):
        pool(refused)


@pytest.mark.parametrize("path", ["model.id", "observing.service_name"])
def test_a_name_has_a_character_at_least(path):
    assert section_fault(path, "a") == ""
    assert path.rsplit(".", 1)[-1] in section_fault(path, "")

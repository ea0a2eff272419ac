"""The charts, rendered, linted and installed by Helm's own library; a test plays the cluster."""

import json
import shutil
from contextlib import contextmanager

import pytest
import yaml

from kappa.settings.front import load_front_settings
from kappa_deploy.checks.manifests import _built_in
from kappa_deploy.k8s import render
from tests.manifests.kubernetes_api import kubernetes_api

helm = pytest.importorskip("helm_python", reason="rendering a chart needs helm-python-sdk")

CHART = render.OVERLAYS.parent / "charts" / "kappa-route"
OPEN = {
    "backends": [{"url": "http://vllm-0.vllm:8000", "profile": "h100-pcie5"}],
    "access": {"allow_open": True},
}
ALL = {
    "config": {"backends": OPEN["backends"], "access": {"max_headers": 50}},
    "keysSecret": "kappa-keys", "replicas": 2, "files": {"mine.json": "{}\n"},
    "monitoring": {"enabled": True, "labels": {"release": "prometheus"}},
    "scaling": {"enabled": True, "statefulSet": "vllm", "maxReplicas": 1},
    "env": [{"name": "A_KEY", "value": "a"}], "imagePullSecrets": [{"name": "pull"}],
    "image": {"repository": "r", "digest": f"sha256:{'0' * 64}"},
    "nodeSelector": {"kubernetes.io/arch": "amd64"}, "tolerations": [{"operator": "Exists"}],
}  # fmt: skip

PICKER = {
    "config": {"epp": {"port": 9002, "pool": {"name": "models/chat"}}, "access": OPEN["access"]}
}


def rendered(values):
    """By kind, of which there is one each."""
    with helm.Chart.load(CHART) as chart:
        texts = chart.render(values, name="front", namespace="llm")
    files = [yaml.safe_load_all(text) for name, text in texts.items() if name.endswith(".yaml")]
    return {document["kind"]: document for file in files for document in file if document}


@pytest.fixture(params=[{"config": OPEN}, ALL], ids=["least", "all"])
def values(request):
    return request.param


def test_chart_passes_helms_lint_and_kubernetes_schemas(values):
    found = helm.lint(CHART, values, strict=True)
    assert not found["errors"] and all(m["severity"] < 2 for m in found["messages"])
    for kind, document in rendered(values).items():
        if kind not in ("ScaledObject", "ServiceMonitor"):
            assert list(_built_in(document)) == []


def test_settings_of_the_chart_are_those_of_kappa_route(values, tmp_path):
    data = rendered(values)["ConfigMap"]["data"]
    keys = tmp_path / "keys.yaml"
    keys.write_text("a-key-of-some-length-or-more: a-tenant\n")
    path = tmp_path / "route.yaml"
    path.write_text(data["route.yaml"].replace("/etc/kappa/keys/keys.yaml", str(keys)))
    settings = load_front_settings(path)
    assert (settings.http.host, settings.http.port) == ("0.0.0.0", 8000)
    assert settings.backends[0].url == "http://vllm-0.vllm:8000"
    assert settings.tenants.unknown == ("refuse" if "keysSecret" in values else "default")
    assert settings.access.max_headers == 50 or "keysSecret" not in values


def test_selectors_select_the_pods_and_ports_exist():
    found = rendered(ALL)
    pod = found["Deployment"]["spec"]["template"]
    labels, (container,) = pod["metadata"]["labels"], pod["spec"]["containers"]
    assert found["Service"]["spec"]["selector"].items() <= labels.items()
    for kind in ("NetworkPolicy", "PodDisruptionBudget", "Deployment"):
        spec = found[kind]["spec"]
        selector = spec["podSelector"] if kind == "NetworkPolicy" else spec["selector"]
        assert selector["matchLabels"].items() <= labels.items()
    ports = {port["name"] for port in container["ports"]}
    assert found["Service"]["spec"]["ports"][0]["targetPort"] in ports
    assert found["NetworkPolicy"]["spec"]["ingress"][0]["ports"][0]["port"] in ports
    monitored = found["ServiceMonitor"]
    assert monitored["spec"]["selector"]["matchLabels"].items() <= (
        found["Service"]["metadata"]["labels"].items()
    )
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["spec"]["volumes"]}
    assert container["image"] == f"r@sha256:{'0' * 64}"


def test_pod_is_not_root_and_writes_to_tmp_only(values):
    pod = rendered(values)["Deployment"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    writable = {
        mount["mountPath"] for mount in container["volumeMounts"] if "readOnly" not in mount
    }
    assert writable == {"/tmp"}


def test_picker_of_a_gateway_may_follow_its_pool_and_no_more(tmp_path):
    found = rendered(PICKER)
    assert [fault for document in found.values() for fault in _built_in(document)] == []
    path = tmp_path / "route.yaml"
    path.write_text(found["ConfigMap"]["data"]["route.yaml"])
    assert load_front_settings(path).epp.pool.name == "models/chat"
    pod = found["Deployment"]["spec"]["template"]["spec"]
    account = found["ServiceAccount"]["metadata"]
    assert pod["serviceAccountName"] == account["name"] and account["namespace"] == "llm"
    for kind in ("Role", "ClusterRole"):
        rules = found[kind]["rules"]
        assert {verb for rule in rules for verb in rule["verbs"]} <= {"get", "list", "watch"}
        bound = found[f"{kind}Binding"]
        assert bound["roleRef"]["name"] == found[kind]["metadata"]["name"]
        assert bound["subjects"][0]["name"] == account["name"]
    assert found["Role"]["metadata"]["namespace"] == "models"
    ports = {port["name"]: port["containerPort"] for port in pod["containers"][0]["ports"]}
    assert ports == {"http": 8000, "epp": 9002}
    assert found["Service"]["spec"]["ports"][1]["targetPort"] == "epp"


def test_servers_are_scaled_on_a_metric_that_exists():
    import promql_parser

    from kappa import metrics

    spec = rendered(ALL)["ScaledObject"]["spec"]
    assert spec["scaleTargetRef"] == {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "name": "vllm",
    }
    (trigger,) = spec["triggers"]
    promql_parser.parse(trigger["metadata"]["query"])
    assert f"{metrics.PREDICTED_TTFT.name}_bucket" in trigger["metadata"]["query"]
    assert 'service="front"' in trigger["metadata"]["query"]
    assert trigger["metadata"]["threshold"] == "0.5"


def test_pods_are_annotated_where_a_deployment_shrinks():
    picker = {"port": 9002, "pool": {"name": "models/chat", "deletion_costs": True}}
    scaling = {"enabled": True, "deployment": "vllm", "maxReplicas": 4}
    kinds = rendered({"config": {**PICKER["config"], "epp": picker}, "scaling": scaling})
    assert "patch" in kinds["Role"]["rules"][1]["verbs"]
    target = kinds["ScaledObject"]["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", "vllm")
    assert "patch" not in rendered(PICKER)["Role"]["rules"][1]["verbs"]


def test_changed_settings_replace_the_pods():
    def annotations(**changes):
        template = rendered({"config": OPEN | changes})["Deployment"]["spec"]["template"]
        return template["metadata"]["annotations"]

    assert annotations() != annotations(router={"policy": "ttft"})


WRONG = {
    "no server": ({"config": {}}, "missing property 'backends'"),
    "an empty list": ({"config": {"backends": []}}, "minItems"),
    "no profile": ({"config": {"backends": [{"url": "http://a"}]}}, "missing property 'profile'"),
    "no keys, not open": ({"config": {"backends": OPEN["backends"]}}, "name a Secret with keys"),
    "an unknown value": ({"config": OPEN, "replica": 2}, "'replica' not allowed"),
    "a wrong digest": ({"config": OPEN, "image": {"repository": "r", "digest": "sha256:1"}},
                       "does not match pattern"),
    "nothing to scale": ({"config": OPEN, "scaling": {"enabled": True}}, "statefulSet"),
    "servers that are not named": (
        {"config": OPEN, "scaling": {"enabled": True, "statefulSet": "s", "maxReplicas": 3}},
        "config.backends names 1 servers and scaling.maxReplicas is 3"),
    "less than the least": (
        {"config": OPEN, "scaling": {"enabled": True, "statefulSet": "s", "minReplicas": 2,
                                     "maxReplicas": 1}},
        "scaling.minReplicas is above scaling.maxReplicas"),
}  # fmt: skip


@pytest.mark.parametrize(("values", "message"), WRONG.values(), ids=WRONG)
def test_wrong_value_is_refused_by_helm(values, message):
    with helm.Chart.load(CHART) as chart, pytest.raises(helm.HelmError, match=message):
        chart.validate_schema(values)
        chart.render(values, name="front", namespace="llm")


def test_schema_lists_every_value():
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert schema["properties"].keys() == values.keys() | {"global"}


@contextmanager
def cluster():
    """(API that is played, Helm before it). Helm keeps its releases to itself."""
    with kubernetes_api() as api:
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "it",
            "clusters": [{"name": "it", "cluster": {"server": api.url}}],
            "contexts": [{"name": "it", "context": {"cluster": "it", "user": "me"}}],
            "users": [{"name": "me", "user": {}}],
        }  # fmt: skip
        text = json.dumps(config)
        with helm.Config(kubeconfig_content=text, storage_driver="memory", namespace="llm") as it:
            yield api, it


def test_helm_installs_upgrades_and_removes_kappa_route():
    with cluster() as (api, it):
        it.install(CHART, "front", {"config": OPEN})
        assert set(api.objects) == {
            "/api/v1/namespaces/llm/configmaps/front", "/api/v1/namespaces/llm/services/front",
            "/apis/apps/v1/namespaces/llm/deployments/front",
            "/apis/networking.k8s.io/v1/namespaces/llm/networkpolicies/front",
        }  # fmt: skip
        it.upgrade(CHART, "front", {"config": OPEN, "replicas": 2})
        assert "PodDisruptionBudget" in api.kinds()
        it.uninstall("front")
        assert api.kinds() == []


@pytest.mark.skipif(
    not (shutil.which("kubectl") or shutil.which("kustomize")),
    reason="rendering needs kubectl or kustomize",
)
@pytest.mark.parametrize("overlay", render.overlays())
def test_chart_of_an_overlay_installs_what_was_rendered(overlay, tmp_path):
    text = render.render(render.OVERLAYS / overlay)
    render.write_chart(text, tmp_path / overlay)
    found = helm.lint(tmp_path / overlay, {}, strict=True)
    assert not found["errors"]
    (image,) = yaml.safe_load((tmp_path / overlay / "values.yaml").read_text()).values()
    wanted = {
        (one["kind"], one["metadata"]["name"]): one
        for one in yaml.safe_load_all(text.replace(f" image: {image}\n", " image: mine:1\n"))
    }
    with cluster() as (api, it):
        it.install(tmp_path / overlay, "kappa-serve", {"image": "mine:1"})
        assert len(api.objects) == len(wanted)
        for one in api.objects.values():
            rendered = wanted[one["kind"], one["metadata"]["name"]]
            assert {k: v for k, v in one.items() if k != "metadata"} == {
                k: v for k, v in rendered.items() if k != "metadata"
            }
            assert one["metadata"].get("namespace") == rendered["metadata"].get("namespace")
        it.uninstall("kappa-serve")
        assert api.kinds() == ["Namespace"]


def test_chart_without_a_folder_is_refused(capsys):
    with pytest.raises(SystemExit):
        render.main(["--chart"])
    assert "--chart needs --out FOLDER" in capsys.readouterr().err

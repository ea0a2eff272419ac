"""Every overlay renders and is sound; a wrong field, anywhere in it, is found. No cluster."""

import copy
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from kappa_deploy import front_pod
from kappa_deploy.checks.facts import Facts
from kappa_deploy.checks.findings import faults
from kappa_deploy.checks.manifests import _without_files
from kappa_deploy.checks.pods import quantity
from kappa_deploy.checks.table import findings
from kappa_deploy.k8s import render
from kappa_deploy.serve_app import settings_of
from kappa_router.gateway.process import find_envoy

ROOT = Path(__file__).parents[2]
K8S, DASHBOARDS = "deploy/kappa_deploy/k8s", "dashboards/kappa_dashboards"

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore:Using extra keyword arguments"),
    pytest.mark.skipif(
        not (shutil.which("kubectl") or shutil.which("kustomize")),
        reason="rendering needs kubectl or kustomize",
    ),
]


@pytest.fixture(scope="module")
def rendered():
    return {name: list(documents(render.OVERLAYS / name)) for name in render.overlays()}


def documents(folder):
    return (document for document in yaml.safe_load_all(render.render(folder)) if document)


def faults_in(documents):
    return faults(findings("manifests", Facts(documents=documents)))


def one(documents, kind):
    return next(document for document in documents if document["kind"] == kind)


@pytest.fixture
def ray_service(rendered):
    def changed(overlay, change):
        found = copy.deepcopy(one(rendered[overlay], "RayService"))
        change(found["spec"])
        return faults_in([found])

    return changed


def test_one_command_renders_all_overlays(tmp_path):
    assert render.overlays() == ["cpu-demo", "gpu-mixed", "gpu-tensor-parallel"]
    assert render.main(["--out", str(tmp_path)]) == 0
    for name in render.overlays():
        found = list(yaml.safe_load_all((tmp_path / f"{name}.yaml").read_text()))
        assert one(found, "RayService")


def test_an_unknown_overlay_is_refused(capsys):
    with pytest.raises(SystemExit):
        render.main(["gpu-unmixed"])
    assert "gpu-unmixed" in capsys.readouterr().err


def test_a_fault_makes_the_command_fail(tmp_path, monkeypatch, capsys):
    text = render.render(render.OVERLAYS / "cpu-demo")
    monkeypatch.setattr(render, "render", lambda _: text.replace("rayVersion", "raysVersion"))
    assert render.main(["--out", str(tmp_path), "cpu-demo"]) == 1
    assert "raysVersion" in capsys.readouterr().err


# The front pods are the first group.
def group(spec, number=0):
    return spec["rayClusterConfig"]["workerGroupSpecs"][number + 1]


def container(spec, number=0):
    return group(spec, number)["template"]["spec"]["containers"][0]


def front(spec):
    return spec["rayClusterConfig"]["workerGroupSpecs"][0]


def envoy(spec):
    return front(spec)["template"]["spec"]["containers"][1]


def resources(number=0, **changes):
    """A change of limits and requests alike; None takes one away. gpus: nvidia.com/gpu."""
    named = {"nvidia.com/gpu" if name == "gpus" else name: of for name, of in changes.items()}

    def change(spec):
        for part in container(spec, number)["resources"].values():
            part.update(named)
            for name in [name for name, given in part.items() if given is None]:
                del part[name]

    return change


def rename(mapping, old, new):
    mapping[new] = mapping.pop(old)


def in_serve(old, new):
    def change(spec):
        assert old in spec["serveConfigV2"]
        spec["serveConfigV2"] = spec["serveConfigV2"].replace(old, new)

    return change


WRONG = {
    "unknown field of the RayService": (lambda s: s.update(upgradeStrategi={}), "upgradeStrategi"),
    "unknown field of a pod": (
        lambda s: rename(container(s), "volumeMounts", "volumesMounts"), "volumesMounts"),
    "unknown field of a probe": (
        lambda s: rename(container(s)["readinessProbe"], "httpGet", "httpGets"), "httpGets"),
    "text for a number": (
        lambda s: group(s).update(replicas="two"), "two"),
    "a group without a name": (
        lambda s: group(s).pop("groupName"), "groupName"),
    "a mount of no volume's name": (
        lambda s: container(s)["volumeMounts"][0].pop("mountPath"), "mountPath"),
    "no YAML in serveConfigV2": (lambda s: s.update(serveConfigV2="{a"), "serveConfigV2"),
    "unknown field of Serve's": (in_serve("proxy_location", "proxy_locations"), "proxy_locations"),
    "Ray's own proxy": (in_serve("Disabled", "EveryNode"), "proxy_location: clients reach"),
    "another application": (in_serve("serve_app:app", "serve_app:apps"), "apps"),
    "an unknown setting": (in_serve("dilation: 30", "dilatation: 30"), "dilatation"),
    "an impossible setting": (in_serve("dilation: 30", "dilation: -1"), "dilation"),
    "an unknown profile": (in_serve("profile: c2c", "profile: d2d"), "d2d"),
    "the wrong number of pods": (
        lambda s: group(s).update(replicas=3), "3 worker pods"),
    "packages installed at start": (
        in_serve("route_prefix: null", "route_prefix: null\n    runtime_env: {pip: [numpy]}"),
        "runtime_env"),
    "too little memory for the host tier": (
        in_serve("dilation: 30", "engine: {host_bytes: 4294967296}"), "would be killed"),
    "too few CPUs for an engine": (
        lambda s: group(s)["rayStartParams"].update({"num-cpus": "1"}),
        "fits none of 2 machine(s): group cpu has CPU 1 of 2"),
    "limits above requests": (
        lambda s: container(s)["resources"]["limits"].update(cpu="8"), "differ"),
}  # fmt: skip


FRONT_WRONG = {
    "fewer front pods than deciders": (
        lambda s: front(s).update(replicas=1),
        "1 front pods (that offer kappa_front) for http.replicas 2"),
    "room for two deciders beside one Envoy": (
        lambda s: front(s)["rayStartParams"].update(resources='"{\\"kappa_front\\": 2}"'),
        "group front: one decider for each Envoy"),
    "a service of another port": (
        lambda s: s["serveService"]["spec"]["ports"][0].update(targetPort="serve"),
        "group front: serveService's targetPort 'serve' is no port of one container"),
    "an Envoy that listens elsewhere": (
        in_serve("{replicas: 2}", "{replicas: 2, port: 8001}"), "or not http.port 8001"),
    "a probe in the clear of a port with TLS": (
        in_serve("{replicas: 2}", "{replicas: 2, tls: {cert: /tls/a, key: /tls/b}}"),
        "group front: readinessProbe's scheme must be HTTPS"),
    "a certificate that is not mounted": (
        in_serve("{replicas: 2}", "{replicas: 2, tls: {cert: /tls/a, key: /tls/b}}"),
        "group front: container envoy mounts nothing that holds /tls/a"),
    "a front pod that goes before its streams": (
        in_serve("drain_s: 240", "drain_s: 280"),
        "group front: each container's preStop drains for drain_s (280)"),
    "an Envoy that goes before its streams": (
        lambda s: envoy(s).pop("lifecycle"), "theirs: [270.0, 0.0]"),
    "a front pod that is killed while it drains": (
        lambda s: front(s)["template"]["spec"].update(terminationGracePeriodSeconds=270),
        "within terminationGracePeriodSeconds (270)"),
}  # fmt: skip


def shm(spec):
    volumes = group(spec)["template"]["spec"]["volumes"]
    return next(volume for volume in volumes if volume["name"] == "shm")["emptyDir"]


GPU_WRONG = {
    "a pool that no group offers a place": (
        in_serve("{pool-a100: 1}", "{pool-b200: 1}"),
        "pools.2.placement: pool a100 fits none of 6 machine(s)"),
    "a pool without its GPU": (
        resources(2, gpus=None), "group a100 has GPU 0 of 1"),
    "fewer pods than a pool starts with": (
        lambda s: group(s, 1).update(replicas=1),
        "pool h100: room for 1 of 2 workers"),
    "fewer pods than a pool may grow to": (
        lambda s: group(s).update(maxReplicas=3),
        "with every pool at its most: pool gh200: room for 3 of 8 workers"),
    "a pool that may grow where no pod comes": (
        lambda s: s["rayClusterConfig"].pop("enableInTreeAutoscaling"),
        "pools gh200, h100 may grow"),
    "a pod killed before its worker has drained": (
        lambda s: group(s)["template"]["spec"].update(terminationGracePeriodSeconds=120),
        "group gh200: terminationGracePeriodSeconds is 120"),
    "too little memory for a pool's own host tier": (
        resources(memory="300Gi"), "group gh200: memory limit 300Gi"),
    # 288 GiB of host tier, 8 GiB of Ray's, 1 GiB of queues.
    "a /dev/shm smaller than what vLLM maps there": (
        lambda s: shm(s).update(sizeLimit="296Gi"),
        "group gh200: /dev/shm has 303104Mi, and the host tier (294912Mi), Ray's object store "
        "(8192Mi) and queues need 304128Mi"),
    # 40 % of a pod's 400 GiB.
    "a host tier of no given size larger than /dev/shm": (
        lambda s: [
            in_serve("host_bytes: 309237645312", "host_bytes: null")(s),
            shm(s).update(sizeLimit="112Gi"),
        ],
        "group gh200: /dev/shm has 114688Mi, and the host tier (163840Mi)"),
    "no volume at /dev/shm at all": (
        lambda s: container(s).update(volumeMounts=container(s)["volumeMounts"][:2]),
        "group gh200: /dev/shm has 64Mi"),
    "an object store of unknown size in the same /dev/shm": (
        lambda s: group(s, 1)["rayStartParams"].pop("object-store-memory"),
        "group h100: rayStartParams lacks object-store-memory"),
}  # fmt: skip


PARALLEL_WRONG = {
    "two workers of a pod in a /dev/shm for one": (
        in_serve("placement: {gpus: 4,", "placement: {gpus: 2,"),
        "the host tier (524288Mi), Ray's object store (8192Mi)"),
    "pods with fewer GPUs than a worker's ranks": (
        resources(gpus="2"), "All 4 GPUs of a worker are of one machine"),
}  # fmt: skip

FAULTS = [("cpu-demo", *fault) for fault in WRONG.values()]
FAULTS += [("gpu-mixed", *fault) for fault in (*FRONT_WRONG.values(), *GPU_WRONG.values())]
FAULTS += [("gpu-tensor-parallel", *fault) for fault in PARALLEL_WRONG.values()]
NAMES = [*WRONG, *FRONT_WRONG, *GPU_WRONG, *PARALLEL_WRONG]


@pytest.mark.parametrize(("overlay", "change", "message"), FAULTS, ids=NAMES)
def test_what_is_wrong_is_found(overlay, change, message, ray_service):
    found = ray_service(overlay, change)
    assert any(message in fault for fault in found), found


def test_only_the_head_that_scales_may_ask_kubernetes(rendered):
    head = one(rendered["gpu-mixed"], "RayService")["spec"]["rayClusterConfig"]["headGroupSpec"]
    assert head["template"]["spec"]["serviceAccountName"] == "kappa-serve-head"
    role = one(rendered["gpu-mixed"], "Role")
    assert {verb for rule in role["rules"] for verb in rule["verbs"]} == {
        "get", "list", "watch", "patch",
    }  # fmt: skip
    assert not [d for d in rendered["cpu-demo"] if d["kind"] in ("Role", "RoleBinding")]


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("NetworkPolicy", lambda s: s.update(podSelectors={}), "podSelectors"),
        ("PodDisruptionBudget", lambda s: s.update(minUnavailable=1), "minUnavailable"),
        ("Service", lambda s: s["ports"][0].update(port="http"), "http"),
        ("ServiceMonitor", lambda s: s["selector"]["matchLabels"].update(a="b"), "selects nothing"),
        ("NetworkPolicy", lambda s: s["podSelector"]["matchLabels"].update(a="b"), "selects"),
    ],
)
def test_what_is_wrong_beside_the_rayservice_is_found(kind, change, message, rendered):
    found = copy.deepcopy(rendered["gpu-mixed"])
    change(one(found, kind)["spec"])
    assert any(message in fault for fault in faults_in(found)), kind


def pods(spec):
    cluster = spec["rayClusterConfig"]
    yield cluster["headGroupSpec"]["template"]["spec"]
    for each in cluster["workerGroupSpecs"]:
        yield each["template"]["spec"]


def test_no_container_runs_as_root_or_may_become_it(rendered):
    for found in rendered.values():
        for pod in pods(one(found, "RayService")["spec"]):
            assert pod["securityContext"]["runAsNonRoot"] is True
            assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            scales = pod["serviceAccountName"] == "kappa-serve-head"
            assert pod["automountServiceAccountToken"] is scales
            for each in (*pod["containers"], *pod.get("initContainers", ())):
                assert each["securityContext"]["allowPrivilegeEscalation"] is False
                assert each["securityContext"]["readOnlyRootFilesystem"] is True
                assert each["securityContext"]["capabilities"] == {"drop": ["ALL"]}
                assert each["image"].startswith("registry.example.com/kappa-serve:")


def test_every_pod_is_probed_and_exposes_its_metrics(rendered):
    for found in rendered.values():
        for pod in pods(one(found, "RayService")["spec"]):
            for each in pod["containers"]:
                assert {"startupProbe", "livenessProbe", "readinessProbe"} <= each.keys()
            ports = {port["name"]: port["containerPort"] for port in pod["containers"][0]["ports"]}
            assert ports["metrics"] == 8080


def test_unlike_gpus_go_to_machines_of_their_own_architecture(rendered):
    spec = one(rendered["gpu-mixed"], "RayService")["spec"]
    groups = {made["groupName"]: made for made in (group(spec, i) for i in range(3))}
    arches = {
        name: made["template"]["spec"]["nodeSelector"]["kubernetes.io/arch"]
        for name, made in groups.items()
    }
    assert arches == {"gh200": "arm64", "h100": "amd64", "a100": "amd64"}
    for name, made in groups.items():
        pod = made["template"]["spec"]
        assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
        assert "nvidia.com/gpu" in {toleration["key"] for toleration in pod["tolerations"]}
        assert yaml.safe_load(made["rayStartParams"]["resources"]) == f'{{"pool-{name}": 1}}'
    keys = {t["key"] for t in groups["gh200"]["template"]["spec"]["tolerations"]}
    assert "kubernetes.io/arch" in keys


def test_four_gpus_of_a_pod_are_one_worker(rendered):
    spec = one(rendered["gpu-tensor-parallel"], "RayService")["spec"]
    _, made = spec["rayClusterConfig"]["workerGroupSpecs"]
    assert container(spec)["resources"]["limits"]["nvidia.com/gpu"] == "4"
    (application,) = yaml.safe_load(spec["serveConfigV2"])["applications"]
    (pool,) = settings_of(_without_files(application["args"])).all_pools
    assert pool.placement.gpus == 4
    assert yaml.safe_load(made["rayStartParams"]["resources"]) == '{"pool-h100x4": 1}'
    assert made["template"]["metadata"]["labels"]["kappa-serve/pool"] == "h100x4"
    # Where vLLM's own host tier is mapped, beside Ray's object store.
    (shm,) = [v for v in made["template"]["spec"]["volumes"] if v["name"] == "shm"]
    assert quantity(shm["emptyDir"]["sizeLimit"]) == (256 + 16) << 30


def test_keys_come_from_a_secret_and_stand_in_no_manifest(rendered):
    spec = one(rendered["gpu-mixed"], "RayService")["spec"]
    assert "by_key" not in spec["serveConfigV2"]
    for pod in pods(spec):
        (keys,) = [v for v in pod["volumes"] if v["name"] == "keys"]
        assert keys["secret"]["secretName"] == "kappa-keys"
    assert not [d for d in rendered["gpu-mixed"] if d["kind"] == "Secret"]


@pytest.fixture
def with_components(tmp_path):
    """gpu-mixed as an overlay of somebody's, with more components and other args."""

    def made(*components, args=""):
        shutil.copytree(ROOT / K8S, tmp_path / K8S)
        shutil.copytree(ROOT / DASHBOARDS, tmp_path / DASHBOARDS)
        serve = tmp_path / K8S / "overlays" / "gpu-mixed" / "serve.yaml"
        serve.write_text(serve.read_text().replace("http: {replicas: 2}", args or "{}"))
        extra = tmp_path / "overlay"
        extra.mkdir()
        # Kustomize takes relative paths only.
        named = [f"../{K8S}/components/{name}" for name in components]
        (extra / "kustomization.yaml").write_text(
            f"resources: [../{K8S}/overlays/gpu-mixed]\ncomponents: {named}\n"
        )
        return list(documents(extra))

    return made


def test_huge_pages_can_be_added(with_components, rendered):
    found = with_components("huge-pages", args="http: {replicas: 2}")
    assert faults_in(found) == []
    before = one(rendered["gpu-mixed"], "RayService")["spec"]
    for number in range(3):
        limits = container(one(found, "RayService")["spec"], number)["resources"]["limits"]
        assert limits["hugepages-2Mi"] == "8Gi"
        assert "hugepages-2Mi" not in container(before, number)["resources"]["limits"]


def test_fronts_speak_tls_with_the_pair_of_a_secret(with_components, tmp_path):
    pair = "{cert: /etc/kappa/tls/tls.crt, key: /etc/kappa/tls/tls.key}"
    found = with_components("tls", args=f"http: {{replicas: 2, tls: {pair}}}")
    assert faults_in(found) == []
    made = envoy(one(found, "RayService")["spec"])
    assert made["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    assert one(found, "ScrapeConfig")["spec"]["scheme"] == "HTTPS"
    files = front_config(found)["data"]
    assert str(front_pod.FOLDER / "certificate.json") in files["envoy.json"]
    assert "/etc/kappa/tls/tls.key" in files["certificate.json"]
    validate(files, tmp_path)


def front_config(found):
    named = [d for d in found if d["kind"] == "ConfigMap"]
    return next(d for d in named if d["metadata"]["name"].startswith(render.FRONT_CONFIG))


def validate(files, folder):
    """Have Envoy say whether it would run by these files, which name a folder of pods."""
    for name, text in files.items():
        (folder / name).write_text(text.replace(str(front_pod.FOLDER), str(folder)))
    front_pod.prepare(folder / "nowhere", folder)
    subprocess.run(
        [find_envoy(), "--mode", "validate", "-l", "error", "-c", folder / "envoy.json"],
        check=True, timeout=60,
    )  # fmt: skip


def test_envoy_runs_by_what_front_pods_mount(rendered, tmp_path):
    for name, found in rendered.items():
        config = front_config(found)
        (volume,) = [
            v for v in front(one(found, "RayService")["spec"])["template"]["spec"]["volumes"]
            if v["name"] == "front-config"
        ]  # fmt: skip
        assert volume["configMap"]["name"] == config["metadata"]["name"]
        folder = tmp_path / name
        folder.mkdir()
        validate(config["data"], folder)


def test_another_configuration_of_envoy_is_another_pods(with_components, rendered):
    found = with_components(args="http: {replicas: 2}\n          access: {max_headers: 50}")
    names = [front_config(each)["metadata"]["name"] for each in (found, rendered["gpu-mixed"])]
    assert names[0] != names[1]


def test_args_that_are_no_settings_are_not_rendered(with_components):
    with pytest.raises(render.RenderError, match=r"serveConfigV2: .*\n *http.replicas"):
        with_components(args="http: {replicas: none}")


def test_clients_and_prometheus_reach_envoys_and_no_worker(rendered):
    for found in rendered.values():
        spec = one(found, "RayService")["spec"]
        (port,) = spec["serveService"]["spec"]["ports"]
        named = [
            each["name"]
            for pod in pods(spec)
            for each in pod["containers"]
            if port["targetPort"] in [p["name"] for p in each.get("ports", ())]
        ]
        assert named == ["envoy"]
        (selected,) = [
            d["spec"]["podSelector"]["matchLabels"]
            for d in found
            if d["kind"] == "NetworkPolicy"
            for rule in d["spec"].get("ingress", ())
            if {"port": 8000} in rule.get("ports", ())
        ]
        assert selected["app.kubernetes.io/component"] == "front"
    # One target, since each front answers for all.
    (scraped,) = one(rendered["gpu-mixed"], "ScrapeConfig")["spec"]["staticConfigs"]
    assert scraped["targets"] == ["kappa-serve-serve-svc.kappa-serve:8000"]


def test_quantities():
    assert quantity("4Gi") == 4 << 30
    assert quantity("1500m") == 1.5
    assert quantity(2) == 2


def test_network_policy_admits_labelled_namespaces_only(rendered):
    for overlay in rendered.values():
        policies = [d["spec"] for d in overlay if d["kind"] == "NetworkPolicy"]
        sources = [s for p in policies for rule in p.get("ingress", ()) for s in rule["from"]]
        elsewhere = [s["namespaceSelector"] for s in sources if "namespaceSelector" in s]
        # Clients, the operator, and Prometheus at two places.
        assert len(elsewhere) == 4 and all(s.get("matchLabels") for s in elsewhere)

"""Renders every overlay with Kustomize and checks each: `./dev manifests`.

`python -m kappa_deploy.k8s.render [--out FOLDER [--chart]] [OVERLAY ...]` writes one YAML file, or
one Helm chart, for each overlay (to standard output without `--out`), after `kappa_deploy.checks`
found no fault in it. To Kustomize's output it adds Envoy's configuration, made from the
application's `args`: a ConfigMap with the digest of its content in its name, so that a changed
configuration replaces the pods. Needs `kubectl` or `kustomize`; no cluster.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from kappa.settings.base import SettingsError
from kappa.settings.cluster import ClusterSettings

OVERLAYS = Path(__file__).parent / "overlays"
FRONT_CONFIG = "kappa-serve-front"
"""The ConfigMap's name before its content's digest."""
_TIMEOUT_S = 60.0


class RenderError(RuntimeError):
    """An overlay could not be rendered; the message says why."""


def overlays() -> list[str]:
    """The names of all overlays."""
    return sorted(path.parent.name for path in OVERLAYS.glob("*/kustomization.yaml"))


def render(folder: Path) -> str:
    """The YAML of one overlay.

    Raises:
        RenderError: there is no Kustomize here, it refuses the overlay, or the overlay's `args` are
            no settings.
    """
    from kappa_deploy.checks.manifests import settings_in

    documents = [one for one in yaml.safe_load_all(_kustomized(folder)) if one]
    for document in [one for one in documents if one["kind"] == "RayService"]:
        try:
            made = _front_config(settings_in(document), document["metadata"]["namespace"])
        except SettingsError as error:
            raise RenderError(f"{folder}: serveConfigV2: {error}") from None
        for group in document["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
            for volume in group["template"]["spec"].get("volumes", ()):
                if volume.get("configMap", {}).get("name") == FRONT_CONFIG:
                    volume["configMap"]["name"] = made["metadata"]["name"]
        documents.append(made)
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=1000)


def _front_config(settings: ClusterSettings, namespace: str) -> dict[str, Any]:
    """The ConfigMap of Envoy's configuration."""
    from kappa_deploy.serve_app import front_door
    from kappa_router.gateway.bootstrap import bootstrap, certificate

    spec = front_door(settings)
    files = {spec.bootstrap_file.name: bootstrap(spec)}
    if spec.tls is not None:
        files[spec.certificate_file.name] = certificate(spec.tls)
    data = {name: json.dumps(content, indent=1) + "\n" for name, content in files.items()}
    digest = hashlib.sha256(json.dumps(data).encode()).hexdigest()[:10]
    metadata = {
        "name": f"{FRONT_CONFIG}-{digest}",
        "namespace": namespace,
        "labels": {"app.kubernetes.io/part-of": "kappa-serve"},
    }
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as such."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _text)


def _kustomized(folder: Path) -> str:
    commands = (["kubectl", "kustomize"], ["kustomize", "build"])
    command = next((each for each in commands if shutil.which(each[0])), None)
    if command is None:
        raise RenderError(
            "neither kubectl nor kustomize is here: https://kubernetes.io/docs/tasks/tools"
        )
    try:
        return subprocess.run(
            [*command, str(folder)], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        ).stdout
    except subprocess.TimeoutExpired:
        raise RenderError(f"{folder}: rendering took over {_TIMEOUT_S:g} s") from None
    except subprocess.CalledProcessError as error:
        raise RenderError(f"{folder}: {error.stderr.strip()}") from None


def write_chart(text: str, folder: Path) -> None:
    """A rendered overlay as a Helm chart: the same objects, with the pods' image as its value."""
    # Ours: all containers of Ray nodes and of Envoy have it.
    image = Counter(re.findall(r" image: (\S+)\n", text)).most_common(1)[0][0]
    template = text.replace("{{", '{{ "{{" }}')
    template = template.replace(f" image: {image}\n", " image: {{ .Values.image }}\n")
    # The version is that of the chart beside it: all are released together.
    about = yaml.safe_load((OVERLAYS.parent / "charts/kappa-route/Chart.yaml").read_text())
    about |= {"name": f"kappa-serve-{folder.name}", "description": f"Overlay {folder.name}"}
    (folder / "templates").mkdir(parents=True, exist_ok=True)
    (folder / "Chart.yaml").write_text(yaml.safe_dump(about), encoding="utf-8")
    (folder / "values.yaml").write_text(yaml.safe_dump({"image": image}), encoding="utf-8")
    (folder / "templates/all.yaml").write_text(template, encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Render and check; 1 if anything is wrong."""
    from kappa_deploy.checks.facts import Facts
    from kappa_deploy.checks.findings import faults
    from kappa_deploy.checks.table import findings

    parser = argparse.ArgumentParser(prog="python -m kappa_deploy.k8s.render", description=__doc__)
    parser.add_argument("overlay", nargs="*", help="default: all of them")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write FOLDER/OVERLAY.yaml")
    parser.add_argument("--chart", action="store_true", help="write Helm charts FOLDER/OVERLAY")
    options = parser.parse_args(arguments)
    if options.chart and not options.out:
        parser.error("--chart needs --out FOLDER")
    unknown = sorted(set(options.overlay) - set(overlays()))
    if unknown:
        parser.error(f"no overlay named {unknown}; there are {overlays()}")
    failed = False
    for name in options.overlay or overlays():
        try:
            text = render(OVERLAYS / name)
        except RenderError as error:
            print(error, file=sys.stderr)
            return 1
        documents = [document for document in yaml.safe_load_all(text) if document]
        found = faults(findings("manifests", Facts(documents=documents)))
        for fault in found:
            print(f"{name}: {fault}", file=sys.stderr)
        failed = failed or bool(found)
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            path = options.out / (name if options.chart else f"{name}.yaml")
            if options.chart:
                write_chart(text, path)
            else:
                path.write_text(text, encoding="utf-8")
            print(f"{path}: {'faulty' if found else 'checked'}")
        elif not found:
            print(f"# {name}\n---\n{text}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

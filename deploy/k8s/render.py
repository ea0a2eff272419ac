"""Renders every overlay with Kustomize and checks each: `./dev manifests`.

`python -m deploy.k8s.render [--out FOLDER] [OVERLAY ...]` writes one YAML file for each overlay (to
standard output without `--out`), after `deploy.k8s.checks` found no fault in it. Needs `kubectl` or
`kustomize`; no cluster.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

OVERLAYS = Path(__file__).parent / "overlays"
_TIMEOUT_S = 60.0


class RenderError(RuntimeError):
    """An overlay could not be rendered; the message says why."""


def overlays() -> list[str]:
    """The names of all overlays."""
    return sorted(path.parent.name for path in OVERLAYS.glob("*/kustomization.yaml"))


def render(folder: Path) -> str:
    """The YAML of one overlay.

    Raises:
        RenderError: there is no Kustomize here, or it refuses the overlay.
    """
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


def main(arguments: list[str] | None = None) -> int:
    """Render and check; 1 if anything is wrong."""
    from deploy.k8s.checks import faults

    parser = argparse.ArgumentParser(prog="python -m deploy.k8s.render", description=__doc__)
    parser.add_argument("overlay", nargs="*", help="default: all of them")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write FOLDER/OVERLAY.yaml")
    options = parser.parse_args(arguments)
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
        found = faults(d for d in yaml.safe_load_all(text) if d)
        for fault in found:
            print(f"{name}: {fault}", file=sys.stderr)
        failed = failed or bool(found)
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            path = options.out / f"{name}.yaml"
            path.write_text(text, encoding="utf-8")
            print(f"{path}: {'faulty' if found else 'checked'}")
        elif not found:
            print(f"# {name}\n---\n{text}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

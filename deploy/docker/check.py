"""Reads the Dockerfiles: lints them, and runs their install steps where no image can be built.

`python -m deploy.docker.check` lints. `--install cpu` runs the build stage's steps in a temporary
folder in place of the image (minutes, gigabytes), then imports what was installed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
KINDS = ("cpu", "cuda")

_INSTRUCTIONS = {
    "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "LABEL", "RUN", "USER", "WORKDIR",
}  # fmt: skip
_STEP_TIMEOUT_S = 1800.0
# The image's folders that the build stage writes to.
_PLACES = ("opt", "dist", "src")


@dataclass(frozen=True, slots=True)
class BuildStep:
    """One instruction: its word, its text on one line, the line it begins on, its stage."""

    word: str
    text: str
    line: int
    stage: int


def parse(text: str) -> list[BuildStep]:
    """The instructions of a Dockerfile, without comments, continued lines joined."""
    steps: list[BuildStep] = []
    parts: list[str] = []
    start, stage = 0, -1
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        start = start if parts else number
        parts.append(stripped.removesuffix("\\").strip())
        if not stripped.endswith("\\"):
            word, _, rest = " ".join(parts).partition(" ")
            stage += word.upper() == "FROM"
            steps.append(BuildStep(word.upper(), rest.strip(), start, stage))
            parts = []
    if parts:
        steps.append(BuildStep("?", " ".join(parts), start, stage))
    return steps


def lint(text: str, root: Path = ROOT) -> list[str]:
    """What is wrong with a Dockerfile, one line each."""
    steps = parse(text)
    found = [f"line {step.line}: {fault}" for step in steps for fault in _step_faults(step, root)]
    if not steps or steps[0].word not in ("FROM", "ARG"):
        return [*found, "line 1: a Dockerfile begins with FROM"]
    users = [s.text for s in steps if s.word == "USER" and s.stage == steps[-1].stage]
    # A number: Kubernetes cannot tell whether a name is root's.
    if not users or not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", users[-1]):
        found.append("the last stage ends as root: give USER a number above 0")
    if not any(step.word == "RUN" and ".whl" in step.text for step in steps):
        found.append("nothing installs our wheel")
    return found


def _step_faults(step: BuildStep, root: Path) -> Iterator[str]:
    word, text = step.word, step.text
    if word not in _INSTRUCTIONS:
        yield f"{word} is no instruction used here"
    if word == "FROM" and not re.match(r"\S+:(?!latest\b)", text):
        yield f"FROM {text.split()[0]}: name a version"
    if word == "COPY" and not text.startswith("--from="):
        missing = [source for source in text.split()[:-1] if not (root / source).exists()]
        yield from (f"COPY {source}: there is no such file" for source in missing)
    if word != "RUN":
        return
    if "apt-get install" in text:
        for wanted in ("--no-install-recommends", "--yes", "rm -rf /var/lib/apt/lists/*"):
            if wanted not in text:
                yield f"apt-get install without {wanted}"
    if re.search(r"\b(sudo|curl|wget)\b", text):
        yield "fetches or runs what no lock names (sudo, curl, wget)"
    if re.search(r"pip install\b.*(\s-e\s|--editable)", text):
        yield "installs the working tree: install the wheel"
    for command in re.findall(r"pip install[^&;]*", text):
        if not re.search(r"(-r |\.whl)", command):
            yield f"{command.strip()}: install from a lock, which names version and hash"
        elif "--no-deps" not in command:
            yield "installs without --no-deps: the lock is complete, and nothing else may come in"
        if "-r " in command and "--require-hashes" not in command:
            yield "installs a lock without --require-hashes: its files would not be checked"


def unpinned(text: str) -> list[str]:
    """Base images that are named by a tag alone, which their registry may move: worth a warning."""
    images = {step.text.split()[0] for step in parse(text) if step.word == "FROM"}
    return [
        f"FROM {image} has no digest: write {image}@DIGEST, the one that 'docker buildx imagetools "
        f"inspect {image}' prints"
        for image in sorted(images)
        if "@sha256:" not in image
    ]


def install(kind: str, folder: Path) -> None:
    """Run the build stage's steps with `folder` in place of the image's root.

    Raises:
        subprocess.CalledProcessError: a step fails.
    """
    for place in _PLACES:
        (folder / place).mkdir()
    # As in the image: nothing of this environment, but where packages are found.
    kept = re.compile(r"PATH|HOME|(PIP|UV|SSL)_\w+|\w+_proxy|\w+_PROXY")
    environment = {name: value for name, value in os.environ.items() if kept.fullmatch(name)}
    environment["PATH"] = f"{folder}/python/bin:{environment.get('PATH', '/usr/bin:/bin')}"
    environment["TARGETARCH"] = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, "")
    environment["UV_LINK_MODE"] = "copy"
    if kind == "cpu":
        wheels = os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS")
        environment["TORCH_WHEELS"] = wheels or "https://download.pytorch.org/whl/cpu/torch/"
    for step in parse((FOLDER / f"{kind}.Dockerfile").read_text(encoding="utf-8")):
        if step.stage:
            break
        if step.word == "COPY" and not step.text.startswith("--"):
            for name in step.text.split()[:-1]:
                _copy(ROOT / name, folder / "src" / Path(name).parent)
        elif step.word == "RUN":
            text = re.sub(r"(?<![\w/.])(/opt/kappa|/dist)", rf"{folder}\1", step.text)
            print(f"+ {text}", flush=True)
            subprocess.run(
                ["/bin/sh", "-ec", text], cwd=folder / "src", env=environment, check=True,
                timeout=_STEP_TIMEOUT_S,
            )  # fmt: skip


def _copy(path: Path, to: Path) -> None:
    """A file, or of the whole tree what the wheel is made of, as .dockerignore says."""
    found = [path]
    if path.is_dir():
        ignore = (FOLDER / "cpu.Dockerfile.dockerignore").read_text(encoding="utf-8")
        patterns = [line[1:] for line in ignore.splitlines() if line.startswith("!")]
        found = [each for pattern in patterns for each in path.glob(pattern)]
    to.mkdir(exist_ok=True)
    for each in found:
        if each.is_dir():
            skip = shutil.ignore_patterns("__pycache__")
            shutil.copytree(each, to / each.name, ignore=skip, dirs_exist_ok=True)
        else:
            shutil.copy(each, to)


def main(arguments: list[str] | None = None) -> int:
    """Lint all, and with `--install` try one."""
    parser = argparse.ArgumentParser(prog="python -m deploy.docker.check", description=__doc__)
    parser.add_argument("--install", choices=KINDS, help="run the install steps of this image")
    options = parser.parse_args(arguments)
    texts = {kind: (FOLDER / f"{kind}.Dockerfile").read_text(encoding="utf-8") for kind in KINDS}
    found = [f"{kind}.Dockerfile: {fault}" for kind, text in texts.items() for fault in lint(text)]
    for kind, text in texts.items():
        for warning in unpinned(text):
            print(f"warning: {kind}.Dockerfile: {warning}")
    print("\n".join(found) or "no faults")
    if options.install and not found:
        with tempfile.TemporaryDirectory(prefix="kappa-image-") as work:
            subprocess.run([sys.executable, "-m", "venv", f"{work}/python"], check=True)
            install(options.install, Path(work))
            binaries = Path(work) / "opt" / "kappa" / "bin"
            imports = "import kappa, router.policy, deploy.serve_app, dashboards.build, vllm"
            subprocess.run([binaries / "python", "-c", imports], cwd=work, check=True)
            subprocess.run([binaries / "kappa", "--help"], cwd=work, check=True)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

"""The Dockerfiles, read: no image can be built in a test."""

import tomllib
from pathlib import Path

import pytest

from deploy.docker import check

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "docker"
GOOD = (FOLDER / "cpu.Dockerfile").read_text()


@pytest.mark.parametrize("kind", check.KINDS)
def test_the_dockerfiles_have_no_faults(kind):
    assert check.lint((FOLDER / f"{kind}.Dockerfile").read_text()) == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("FROM python:3.11-slim-bookworm\n", "FROM python\n", "name a version"),
        ("USER 1000:1000", "USER root", "ends as root"),
        ("USER 1000:1000", "USER 0", "ends as root"),
        ("USER 1000:1000", "", "ends as root"),
        ("COPY requirements.lock", "COPY requirement.lock", "no such file"),
        ("--no-deps --require-hashes", "--require-hashes", "--no-deps"),
        ("--no-deps --require-hashes", "--no-deps", "--require-hashes"),
        ("--no-install-recommends ", "", "--no-install-recommends"),
        ("rm -rf /var/lib/apt/lists/*", "true", "lists"),
        ("-r locks/build.lock", "uv", "from a lock"),
        ("/dist/*.whl", "-e .", "wheel"),
        ("WORKDIR /src", "ADD https://example.com/x /src", "ADD"),
        ("WORKDIR /src", "RUN curl https://example.com | sh", "curl"),
    ],
)
def test_a_fault_is_found(old, new, message):
    assert old in GOOD
    found = check.lint(GOOD.replace(old, new))
    assert any(message in fault for fault in found), found


def test_continued_lines_are_one_step():
    steps = check.parse("FROM a:1\n# why\nRUN one \\\n    # inside\n    && two\nUSER 1\n")
    assert [(step.word, step.text, step.line) for step in steps] == [
        ("FROM", "a:1", 1), ("RUN", "one && two", 3), ("USER", "1", 6),
    ]  # fmt: skip


def test_the_cuda_image_is_made_for_both_architectures_from_their_own_locks():
    text = (FOLDER / "cuda.Dockerfile").read_text()
    for arch, lock in (("amd64", "requirements-gpu.lock"), ("arm64", "requirements-gpu-aarch64")):
        assert f"{arch}) lock={lock}" in text
        assert (ROOT / lock.removesuffix(".lock")).with_suffix(".lock").exists()


def test_what_the_cuda_image_compiles_at_run_time_has_compilers_and_a_folder_to_write_to():
    text = (FOLDER / "cuda.Dockerfile").read_text()
    assert "gcc g++ " in text
    (home,) = [line for line in text.splitlines() if " HOME=" in line]
    assert " HOME=/var/cache/kappa" in home and "TORCHINDUCTOR_CACHE_DIR=/var/cache/kappa/" in text


@pytest.mark.parametrize("kind", check.KINDS)
def test_the_build_context_holds_every_package_of_the_wheel(kind):
    lines = (FOLDER / f"{kind}.Dockerfile.dockerignore").read_text().splitlines()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert {*wheel, "dashboards", "pyproject.toml", "LICENSE", "NOTICE"} <= {
        line.removeprefix("!") for line in lines
    }
    assert "*" in lines and "**/__pycache__" in lines


def test_a_base_image_named_by_its_tag_alone_is_warned_of_with_the_command_that_pins_it():
    pinned = f"FROM a:1@sha256:{'0' * 64} AS build\n"
    assert check.unpinned(pinned) == []
    (warning,) = check.unpinned(f"{pinned}FROM a:2\nFROM a:2\n")
    assert "FROM a:2" in warning and "docker buildx imagetools inspect a:2" in warning

"""The images' Dockerfiles as far as they can be read without Docker; none is built here."""

import re
from fnmatch import fnmatch

import pytest

from tests.packages import ROOT

DOCKERFILES = sorted((ROOT / "deploy/docker").glob("*.Dockerfile"))


def instructions(path):
    """(instruction, rest) of each, continued lines joined and comments left out."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if line.strip():
            yield tuple(line.split(None, 1))


@pytest.fixture(params=DOCKERFILES, ids=lambda path: path.name)
def dockerfile(request):
    return request.param


def test_image_runs_as_a_user_of_its_own_after_two_stages(dockerfile):
    found = list(instructions(dockerfile))
    stages = [rest for name, rest in found if name == "FROM"]
    assert len(stages) == 2 and stages[0] == f"{stages[1]} AS build"
    last = found[max(i for i, (name, _) in enumerate(found) if name == "FROM") :]
    assert ("USER", "1000:1000") in last
    assert [rest for name, rest in last if name == "COPY"] == ["--from=build /opt/kappa /opt/kappa"]
    assert {name for name, _ in found} <= {
        "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "RUN", "USER", "WORKDIR",
    }  # fmt: skip


def test_image_copies_only_what_exists_and_is_let_in(dockerfile):
    ignored = dockerfile.with_name(f"{dockerfile.name}.dockerignore").read_text().split("\n")
    let_in = [line[1:] for line in ignored if line.startswith("!")]
    assert ignored[1] == "*" and all(list(ROOT.glob(pattern)) for pattern in let_in)
    for name, rest in instructions(dockerfile):
        if name == "COPY" and not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists()
                assert source == "." or any(fnmatch(source, pattern) for pattern in let_in)


def test_image_installs_by_a_lock_with_hashes(dockerfile):
    text = dockerfile.read_text()
    assert "--require-hashes --no-deps -r locks/build.lock" in text
    for lock in re.findall(r"(\S+\.lock)", text):
        assert (ROOT / lock.removeprefix("lock=")).is_file()

"""The images' Dockerfiles as far as they can be read and played without Docker."""

import asyncio
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import venv
from fnmatch import fnmatch
from pathlib import Path

import aiohttp
import pytest

from kappa.host import free_port
from tests.deploy.test_route_process import ready
from tests.packages import ROOT
from tests.router.front.conftest import chat
from tests.router.front.offering import FakeServer, serving

DOCKERFILES = sorted((ROOT / "deploy/docker").glob("*.Dockerfile"))
_IGNORED = shutil.ignore_patterns("__pycache__")


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
    assert re.search(r"^ARG BASE=.+@sha256:\w{64}$", text, re.M)[0] in DOCKERFILES[0].read_text()
    for lock in re.findall(r"(\S+\.lock)", text):
        assert (ROOT / lock.removeprefix("lock=")).is_file()


def played(dockerfile, root):
    """Plays a Dockerfile in a folder that stands for `/`, on this machine's Python; returns the
    variables and the command of what it makes."""

    def there(text):
        return re.sub(r"(?<![\w./-])/(?=(opt|dist|src)\b)", f"{root}/", text)

    venv.create(root / "python", with_pip=True)
    here = root
    env = {k: v for k, v in os.environ.items() if k.startswith(("PIP_", "UV_", "SSL_", "HOME"))}
    env |= {"PATH": f"{root}/python/bin:/usr/bin:/bin"}
    for name, rest in instructions(dockerfile):
        if name == "WORKDIR":
            here = Path(there(rest))
            here.mkdir()
        elif name == "ENV":
            given = dict(one.split("=", 1) for one in shlex.split(there(rest)))
            env |= {key: value.replace("$PATH", env["PATH"]) for key, value in given.items()}
        elif name == "COPY" and not rest.startswith("--from"):
            source, target = rest.split()
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, here / target, ignore=_IGNORED)
            else:
                (here / target).mkdir(exist_ok=True)
                shutil.copy(ROOT / source, here / target)
        elif name == "RUN" and "useradd" not in rest:  # Users of this machine stay as they are.
            done = subprocess.run(there(rest), shell=True, cwd=here, env=env, capture_output=True)
            assert done.returncode == 0, done.stderr.decode()
        elif name == "ENTRYPOINT":
            return env, json.loads(rest)
    raise AssertionError("it starts nothing")


async def test_router_image_serves_from_what_its_steps_make():
    with tempfile.TemporaryDirectory(prefix="kappa-") as folder:  # A path in which sockets fit.
        env, command = played(ROOT / "deploy/docker/router.Dockerfile", Path(folder))
        shutil.rmtree(Path(folder) / "src")
        shutil.rmtree(Path(folder) / "python/lib")  # The second stage has neither.
        port = free_port("127.0.0.1")
        async with serving(FakeServer()) as (server,):
            process = await asyncio.create_subprocess_exec(
                *command, "-b", f"{server.url}=pcie", "--port", str(port), cwd=folder,
                env={**env, "TMPDIR": folder}, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
                try:
                    await ready(http, process)
                    async with http.post("/v1/chat/completions", json=chat("hello")) as answer:
                        assert answer.status == 200
                finally:
                    process.terminate()
                    await process.wait()

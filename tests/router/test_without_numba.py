"""Without numba the loops run as Python: the same decisions, constants and refusals, slower."""

import json
import subprocess
import sys

import numpy as np
import pytest

from kappa_router import engine_fit, json_body
from kappa_router.index.prefix_hash import PrefixHasher
from tests.packages import PACKAGES, ROOT
from tests.router.building import ask, hasher_of, prompt, router, small

BODIES = (
    b'{"a": "\\"[,]", "messages": [{"role": "user", "content": "x, {y}"}], "n": [1, 2, [3]]}',
    b'{"a": "no end', b'{"a": "\\', b'{"a": [1, 2}', b'{"a": 1,}', b"[1]", b'{"a": {"b": [,]}} x',
)  # fmt: skip


def read(body):
    try:
        return json_body.read_object(body, ("messages", "n"))["messages"]
    except (json_body.NoObjectError, json_body.MalformedError) as error:
        return type(error).__name__


def decided(policy):
    """Choices and predictions of a history with caches that fill, first tokens and ends."""
    made, rng = router(small("a"), small("b", "c2c"), "c", policy=policy), np.random.default_rng(1)
    for at in range(60):
        if at % 7 == 0:
            made.index.hold(
                "abc"[at % 3], "host", hasher_of(made).prefix_hashes(prompt(160, at % 4))
            )
        name = f"r{at}"
        chosen = made.route(ask(name, int(rng.integers(1, 400)), at % 4), at / 10)
        yield [chosen.worker, chosen.reason, chosen.chosen.ttft_s]
        made.first_token(name, at / 10 + 0.05)
        if at % 3:
            made.release(name, at / 10 + 0.09)


def learnt():
    """The logarithms of an engine's constants after 40 steps."""
    rng, count = np.random.default_rng(2), len(engine_fit.CONSTANTS)
    rows = np.zeros(40, dtype=engine_fit.OBSERVATION)
    rows["seconds"], rows["steps"] = rng.uniform(0.01, 0.1, 40), 1
    rows["tokens"], rows["pairs"] = rng.integers(1, 4000, (2, 40))
    widths = np.full(engine_fit.PARAMETERS, 0.5)
    prior = engine_fit.Prior(np.full(count, 1e-5), np.full(count, 1e-9), widths, 6 * widths)
    theta = np.zeros(engine_fit.PARAMETERS)
    covariance = engine_fit.fit(rows, theta, prior, np.full(4, 0.1), np.ones(40))
    expected = engine_fit.expected(rows[:3], theta, covariance, prior.values, prior.floors)
    return np.concatenate([theta, *expected]).tolist()


def all_of_it():
    return {
        "hashes": PrefixHasher(16, 5).prefix_hashes(prompt(100), salt=3).tolist(),
        "bodies": list(map(read, BODIES)),
        "learnt": learnt(),
        **{policy: list(decided(policy)) for policy in ("priced", "ttft", "threshold")},
    }


@pytest.fixture(scope="module")
def uncompiled():
    """The same by a process in which numba cannot be imported."""
    script = (
        "import json, sys; sys.modules['numba'] = None; "
        f"sys.path[:0] = {[str(p.parent) for p in PACKAGES.values()]}; "
        "from tests.router.test_without_numba import all_of_it; print(json.dumps(all_of_it()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def compiled():
    return json.loads(json.dumps(all_of_it()))


@pytest.mark.parametrize("part", ["hashes", "bodies"])
def test_hashes_and_bodies_are_read_alike_without_numba(part, uncompiled, compiled):
    assert uncompiled[part] == compiled[part]


def test_constants_are_learnt_alike_without_numba(uncompiled, compiled):
    assert uncompiled["learnt"] == pytest.approx(compiled["learnt"], rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("policy", ["priced", "ttft", "threshold"])
def test_decisions_are_alike_without_numba(policy, uncompiled, compiled):
    for (worker, reason, ttft_s), wanted in zip(uncompiled[policy], compiled[policy], strict=True):
        assert [worker, reason] == wanted[:2]
        assert ttft_s == pytest.approx(wanted[2], rel=1e-9)

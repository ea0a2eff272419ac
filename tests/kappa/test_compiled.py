"""Compiled loops: the same results as without a compiler, with a place to keep them or none."""

import ast
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kappa import compiled as module
from kappa.compiled import compiled
from kappa_router import policy, reservations, ttft
from kappa_router.decision import ESTIMATE
from tests.packages import dotted, modules


def _ratio(a: float, b: float) -> float:
    return a / b


def test_a_division_by_zero_is_infinite_as_with_arrays():
    assert compiled(_ratio)(1.0, 0.0) == math.inf
    assert math.isnan(compiled(_ratio)(0.0, 0.0))


def test_compiled_works_without_a_cache_when_none_is_writable(monkeypatch):
    caches = []

    def njit(cache=False, **options):
        caches.append(cache)
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return real(**options)

    real = module.njit
    monkeypatch.setattr(module, "njit", njit)
    assert compiled(_ratio)(1.0, 4.0) == 0.25
    assert caches == [True, False]


def test_other_errors_are_not_hidden(monkeypatch):
    def njit(**options):
        raise TypeError("an option that numba does not know")

    monkeypatch.setattr(module, "njit", njit)
    with pytest.raises(TypeError, match="does not know"):
        compiled(_ratio)


def compiling_files():
    files = [p for package in ("kappa", "kappa_router") for p in modules(package)]
    return [p for p in files if "@compiled" in p.read_text()]


@pytest.mark.parametrize("path", compiling_files(), ids=lambda p: p.name)
def test_compiled_loop_uses_only_files_whose_changes_are_seen(path):
    tree = ast.parse(path.read_text())
    watched = {dotted(p) for p in compiling_files()}
    ours = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        and node.module.split(".")[0] in ("kappa", "kappa_router")
        for alias in node.names
        if not watched & {node.module, f"{node.module}.{alias.name}"}
    }
    loops = [
        node for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(d, ast.Name) and d.id == "compiled" for d in node.decorator_list)
    ]  # fmt: skip
    assert loops
    for loop in loops:
        used = {n.id for line in loop.body for n in ast.walk(line) if isinstance(n, ast.Name)}
        assert not used & ours, f"{loop.name} freezes {used & ours} of another file"


_USER = """
import base
from kappa.compiled import compiled

@compiled
def user(x):
    return base.scaled(x) + base.MORE
print(user(1.0))
"""


@pytest.mark.parametrize("changed", [(3.0, 10.0), (2.0, 20.0)])
def test_compiled_sees_a_change_of_what_it_uses_of_another_file(tmp_path, changed):
    def run(factor, more):
        base = f"@compiled\ndef scaled(x):\n    return {factor} * x\nMORE = {more}\n"
        (tmp_path / "base.py").write_text(f"from kappa.compiled import compiled\n{base}")
        command = [sys.executable, "user.py"]
        # Python looks at the age of a source in seconds, and would keep the old one.
        places = {
            "PYTHONPATH": str(Path(module.__file__).parents[1]), "PATH": os.environ["PATH"],
            "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip
        done = subprocess.run(
            command, cwd=tmp_path, env=places, capture_output=True, text=True, timeout=300
        )
        return done.stdout.strip(), done.stderr

    (tmp_path / "user.py").write_text(_USER)
    assert run(2.0, 10.0) == ("12.0", "")
    kept = sorted(tmp_path.rglob("*.nbc"))
    assert kept
    assert run(2.0, 10.0) == ("12.0", "") and sorted(tmp_path.rglob("*.nbc")) == kept
    assert run(*changed) == (f"{changed[0] + changed[1]}", "")


@pytest.mark.parametrize("source", [-1, 3])
def test_the_prices_are_those_that_python_gives(source):
    rng = np.random.default_rng(0)
    workers = np.zeros(5, dtype=ttft.WORKER)
    for name in workers.dtype.names:
        workers[name] = rng.uniform(0.5, 2.0, workers[name].shape)
    workers["spare_tokens"] += 2.0
    workers["net_tokens_per_s"][0] = workers["spare_tokens"][1] = 0.0
    workers["decoding"][2] = 0.0
    workers["resident_tokens"][4] = 5000.0
    for slot in range(5):
        reservations.keep_factors(workers, slot)
    # Fields that are not given are overwritten.
    estimates = np.full(4, np.nan, dtype=ESTIMATE)
    estimates["device_tokens"], estimates["cached_tokens"] = rng.uniform(0, 100, (2, 4))
    estimates["disk_tokens"] = 0.0
    estimates["cached_tokens"][0] = 0.0
    estimates["fetch_tokens"] = estimates["cached_tokens"] / 100
    rest = (3.0, 20.0, 1000.0, 50.0), source, (0.5, 5.0, 0.1, 3.0)
    slots, got, expected = np.array([4, 0, 1, 2]), estimates.copy(), estimates.copy()
    ttft.price(workers, slots, got, *rest)
    # Without a compiler only record arrays have their fields as attributes.
    records = workers.view(np.recarray), slots, expected.view(np.recarray)
    ttft.price.py_func(*records, *rest)
    for name in got.dtype.names:
        assert not np.isnan(got[name]).any(), name
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-12, err_msg=name)
    assert (got["interference_s"] > 0).all()


def test_the_score_is_the_one_that_python_gives():
    rng = np.random.default_rng(1)
    rows = np.zeros(7, dtype=ESTIMATE)
    for name in rows.dtype.names:
        rows[name] = rng.uniform(0.1, 0.9, 7)
    got, expected = np.empty(7), np.empty(7)
    found = policy._cheapest(rows, got)
    assert policy._cheapest.py_func(rows.view(np.recarray), expected) == found
    np.testing.assert_allclose(got, expected, rtol=1e-12)

"""The goldens: by the name of its file, what makes each; how two are compared."""

import json
import math
from pathlib import Path

from tests.golden import simulations, surfaces

FOLDER = Path(__file__).parent
# Seconds may differ in the last bits between processors (fused multiplications, wider vectors).
RELATIVE = 1e-9

GOLDENS = {
    "simulations": simulations.simulations,
    "commands": surfaces.commands,
    "http": surfaces.http,
    "metrics": surfaces.metrics,
    "settings": surfaces.settings,
    "manifests": surfaces.manifests,
}


def stored(name):
    """The stored golden; None before it was first made."""
    path = FOLDER / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def store(name, value):
    """Hold `value` to be right from now on."""
    text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    (FOLDER / f"{name}.json").write_text(text, encoding="utf-8")


def differences(then, now, at=""):
    """One line for every place in which two JSON values differ."""
    if isinstance(then, dict) and isinstance(now, dict):
        return [
            line
            for key in sorted({*then, *now})
            for line in differences(then.get(key, _ABSENT), now.get(key, _ABSENT), f"{at}/{key}")
        ]
    if isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        return [
            line
            for index, (one, other) in enumerate(zip(then, now, strict=True))
            for line in differences(one, other, f"{at}/{index}")
        ]
    if isinstance(then, list) and isinstance(now, list) and all(isinstance(i, str) for i in then):
        gone = [f"{at}: {item} is gone" for item in then if item not in now]
        return gone + [f"{at}: {item} is new" for item in now if item not in then]
    if isinstance(then, float) and isinstance(now, float):
        return [] if math.isclose(then, now, rel_tol=RELATIVE) else [f"{at}: {then!r} -> {now!r}"]
    return (
        [] if then == now and type(then) is type(now) else [f"{at}: {_text(then)} -> {_text(now)}"]
    )


class _Absent:
    def __repr__(self):
        return "nothing"


_ABSENT = _Absent()


def _text(value):
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"

"""Which of our source files a module can execute: it, and all that it imports, in turn."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def source_closure(modules: Sequence[str], root: Path = _ROOT) -> list[Path]:
    """Files under `root` that `modules` import, directly or not, theirs included, sorted."""
    found: set[Path] = set()
    queue = list(modules)
    while queue:
        path = _file_of(queue.pop(), root)
        if path is None or path in found:
            continue
        found.add(path)
        queue += _imports(path)
    return sorted(found)


def _file_of(module: str, root: Path) -> Path | None:
    base = root.joinpath(*module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


def _imports(path: Path) -> Iterator[str]:
    """Names that may be modules; imports inside functions count."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)

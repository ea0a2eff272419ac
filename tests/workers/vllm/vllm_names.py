"""Names in vLLM's sources, read without importing them: so that a release can be checked which is
not installed, and has no build for this machine.

    python -m tests.workers.vllm.vllm_names FOLDER_WITH_vllm > tests/workers/vllm/vllm-0.33.0.json
"""

import ast
import json
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[3]
PRODUCT = ("workers", "deploy", "router", "benchmarks")


@cache
def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def our_files(version):
    """Our files that run with a version of vLLM."""
    other = {"v0_31.py"} if version.startswith("0.29") else {"v0_29.py"}
    files = (path for name in PRODUCT for path in sorted((ROOT / name).rglob("*.py")))
    return [path for path in files if path.name not in other]


def our_imports(version):
    """(our file, vLLM's module, name) of every import from vLLM."""
    return [
        (str(path.relative_to(ROOT)), node.module, alias.name)
        for path in our_files(version)
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
        for alias in node.names
    ]


def module_path(root, module):
    path = root / module.replace(".", "/")
    return path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"


def class_names(node):
    """A class' bases, methods with their parameters, and attributes."""
    methods = {
        one.name: [a.arg for a in (*one.args.posonlyargs, *one.args.args, *one.args.kwonlyargs)][
            not any(getattr(d, "id", "") == "staticmethod" for d in one.decorator_list) :
        ]
        for one in node.body
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    attributes = {
        target.attr if isinstance(target, ast.Attribute) else target.id
        for one in ast.walk(node)
        for target in (
            one.targets if isinstance(one, ast.Assign)
            else [one.target] if isinstance(one, ast.AnnAssign) else []
        )
        if isinstance(target, ast.Name)
        or (isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self")
    }  # fmt: skip
    bases = [ast.unparse(base).split(".")[-1] for base in node.bases]
    return {"bases": bases, "methods": methods, "attributes": sorted(attributes)}


def top_level(statements):
    """A module's own statements, those behind conditions too."""
    for node in statements:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            yield from top_level(node.body)
            yield from top_level(getattr(node, "orelse", []))
            for handler in getattr(node, "handlers", []):
                yield from top_level(handler.body)


def module_names(root, module, wanted):
    """What a module defines or imports; the wanted classes in full; None: there is none such."""
    path = module_path(root, module)
    if not path.exists():
        return None
    names, classes = set(), {}
    for node in top_level(parsed(path).body):
        if isinstance(node, ast.ClassDef) and node.name in wanted:
            classes[node.name] = class_names(node)
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
    # A package's modules can be imported from it; a lazy one lists what it offers.
    if path.name == "__init__.py":
        names |= {child.stem for child in path.parent.iterdir()}
        names |= {n.value for n in ast.walk(parsed(path)) if isinstance(n, ast.Constant)
                  and isinstance(n.value, str) and n.value.isidentifier()}  # fmt: skip
    return {"names": sorted(names), "classes": classes}


def index(root, version):
    """{vLLM's module: its names} of all modules that we import from."""
    imports = our_imports(version)
    modules = sorted({module for _, module, _ in imports} | set(ALSO))
    wanted = {name for _, _, name in imports}.union(*(ALSO[module] for module in ALSO))
    return {module: module_names(root, module, wanted) for module in modules}


_OFFLOADING = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"
ALSO = {
    "vllm.v1.core.sched.scheduler": {"Scheduler"},
    f"{_OFFLOADING}.scheduler": {"OffloadingConnectorScheduler", "RequestOffloadState"},
    f"{_OFFLOADING}.events": {"OffloadingEventsTracker"},
    "vllm.v1.kv_offload.cpu.policies.base": {"CachePolicy"},
}
"""Modules, and classes of theirs with private names that we use through our imports."""


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    found = index(folder, "0.33.0")
    lines = (f"{json.dumps(key)}: {json.dumps(found[key], sort_keys=True)}" for key in found)
    print("{\n" + ",\n".join(lines) + "\n}")

"""`kappa keys`: make API keys, hash them for a keys file, and list a file's tenants.

A key is shown once, when it is made, on standard output alone. A keys file holds digests, which
open nothing to its readers.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import stat
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
import yaml

from kappa.keys import (
    TENANT_NAME,
    entry_fault,
    hashed,
    is_hashed,
    new_key,
    read_digests,
    read_entries,
)
from kappa_deploy.commands.console import Json, print_json, print_table
from kappa_router.console import fail, warn

app = typer.Typer(help="Make, hash and list API keys.", no_args_is_help=True)

_KEY_BYTES = 32


@app.command()
def new(
    tenant: Annotated[str, typer.Argument(help="The tenant of the key.")],
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Keys file to add its digest to.")
    ] = None,
    json_output: Json = False,
) -> None:
    """Make a key; print it once, with the line for the keys file."""
    key = new_key(secrets.token_bytes(_KEY_BYTES))
    line = _line(key, tenant)
    if file is not None:
        _append(file, line)
    if json_output:
        print_json({"key": key, "tenant": tenant, "line": line})
        return
    print(key)
    where = f"is in {file}" if file is not None else f"for the keys file:\n{line}"
    warn(f"The key is shown this once. Its digest {where}", "dim")


@app.command("hash")
def hash_(
    tenant: Annotated[
        str | None, typer.Argument(help="Print a whole line for a keys file.")
    ] = None,
) -> None:
    """Hash a key read from standard input, so that it stands in no shell history."""
    if sys.stdin.isatty():
        warn("the key, then Enter:", "dim")
    key = sys.stdin.readline().strip()
    fault = "is a digest already" if is_hashed(key) else entry_fault(key)
    if fault is not None:
        fail(f"the key {fault}", 2)
    print(hashed(key) if tenant is None else _line(key, tenant))


@app.command("list")
def list_(
    file: Annotated[Path, typer.Argument(help="Keys file.")], json_output: Json = False
) -> None:
    """List a file's tenants, with their keys and those of them that stand in the clear."""
    try:
        tenants = Counter(read_digests(file).values())
        clear = Counter(
            tenant for entry, tenant in read_entries(file).items() if not is_hashed(entry)
        )
    except ValueError as error:
        fail(str(error), 2)
    rows = [
        {"tenant": tenant, "keys": count, "in_clear": clear[tenant]}
        for tenant, count in sorted(tenants.items())
    ]
    if json_output:
        print_json({"file": str(file), "tenants": rows})
        return
    cells = [[str(value) for value in row.values()] for row in rows]
    print_table(None, ("tenant", "keys", "in the clear"), cells)
    if clear.total():
        warn(
            "Keys in the clear let in whoever reads the file: replace each by what 'kappa keys "
            "hash' prints."
        )


def _line(key: str, tenant: str) -> str:
    """A line for the keys file; a tenant such as `no` or `007`, else read as none, in quotes.

    Exits with 2 if it is no tenant's name.
    """
    if not re.fullmatch(TENANT_NAME, tenant):
        fail(f"{tenant!r} is no tenant's name: letters, digits, '.', '_' and '-', at most 64", 2)
    entry = tenant if yaml.safe_load(tenant) == tenant else json.dumps(tenant)
    return f"{hashed(key)}: {entry}"


def _append(file: Path, line: str) -> None:
    """Add a line; readers see the file as it was or whole. Only its owner can read a new file."""
    try:
        text = ""
        if file.exists():
            read_digests(file)  # A faulty file is not made longer.
            text = file.read_text(encoding="utf-8")
        target = file.resolve()  # a link to it stays
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with open(handle, "w", encoding="utf-8") as out:
                if target.exists():
                    was = target.stat()
                    os.fchown(handle, was.st_uid, was.st_gid)
                    os.fchmod(handle, stat.S_IMODE(was.st_mode))
                out.write(f"{text}{line}\n")
                out.flush()
                os.fsync(handle)
            os.replace(name, target)
        except BaseException:
            os.unlink(name)
            raise
    except ValueError as error:
        fail(str(error), 2)
    except OSError as error:
        fail(f"{file}: cannot be written: {error.strerror}", 2)

"""The file of API keys: lines of `sha256:HEX: tenant`, or `KEY: tenant` with the key in the clear.

Read when settings are loaded and again by every ingress when the file changes. A fault is named
with the file and the place, never with the text, which may be a key. The last line must end with a
line break: a file that was cut short within a line would otherwise be valid, with a shortened name.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from kappa.keys import entry_digest, entry_fault
from kappa.settings.base import TENANT_NAME

_MAX_FILE_BYTES = 4 << 20


class KeysUnreadableError(ValueError):
    """The file could not be opened or read: nothing is known of what it says."""


def read_entries(path: str | Path) -> dict[str, Any]:
    """The file's entries as they stand there; what they say is not checked.

    Raises:
        ValueError: it cannot be read, is no mapping, or is cut short.
    """
    try:
        with Path(path).open("rb") as file:
            raw = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise KeysUnreadableError(f"keys_file {path}: cannot be read: {error.strerror}") from None
    if len(raw) > _MAX_FILE_BYTES:
        raise ValueError(f"keys_file {path}: has more than {_MAX_FILE_BYTES} bytes")
    if raw and not raw.endswith(b"\n"):
        raise ValueError(
            f"keys_file {path}: the last line has no line break, so the file may be cut short: "
            "end it with one"
        )
    try:
        twice, data = _parsed(raw.decode())
    except (UnicodeDecodeError, yaml.YAMLError, ValueError, RecursionError):
        raise ValueError(f"keys_file {path}: is not YAML; write 'key: tenant' lines") from None
    if twice:
        raise ValueError(f"keys_file {path}: line {twice} gives a key a second time: drop one")
    if not isinstance(data, dict):
        raise ValueError(f"keys_file {path}: is no mapping; write 'key: tenant' lines")
    return data


def read_digests(path: str | Path) -> dict[bytes, str]:
    """Digest -> tenant of every entry, all of them checked.

    Raises:
        ValueError: the first entry at fault, by its place among the entries.
    """
    found: dict[bytes, str] = {}
    for place, (entry, tenant) in enumerate(read_entries(path).items(), 1):
        where = f"keys_file {path}: entry {place}"
        if not isinstance(entry, str):
            raise ValueError(f"{where}: the key is no text; put it in quotes")
        if not (isinstance(tenant, str) and re.fullmatch(TENANT_NAME, tenant)):
            raise ValueError(f"{where}: the tenant is no name such as 'alice' or 'team-7'")
        fault = entry_fault(entry)
        if fault is not None:
            raise ValueError(f"{where}: the key {fault}")
        digest = entry_digest(entry)
        if found.setdefault(digest, tenant) != tenant:
            raise ValueError(f"{where}: another entry gives the same key to another tenant")
    return found


def _parsed(text: str) -> tuple[int, Any]:
    """The line of a key that is given twice, 0 without one, and what the file holds."""
    # libyaml's loader: 1,000 keys take a twentieth of the time of the one in Python.
    loader = yaml.CSafeLoader(text)
    try:
        node = loader.get_single_node()
        # The loader takes the last of two equal keys in silence; a key given twice is a mistake.
        return _given_twice(node), None if node is None else loader.construct_document(node)
    finally:
        loader.dispose()


def _given_twice(node: Any) -> int:
    """The line of the first key that stood there before; 0 without one."""
    seen = set()
    for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
        if isinstance(key, yaml.ScalarNode):
            if key.value in seen:
                return int(key.start_mark.line) + 1
            seen.add(key.value)
    return 0

"""The file of API keys: lines of `sha256:HEX: tenant`, or `KEY: tenant` with the key in the clear.

Read when settings are loaded and again by every ingress when the file changes. A fault is told
with the file and the place, never with the text, which may be a key.
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
        ValueError: it cannot be read, or is no mapping.
    """
    try:
        with Path(path).open("rb") as file:
            raw = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise KeysUnreadableError(f"keys_file {path}: cannot be read: {error.strerror}") from None
    if len(raw) > _MAX_FILE_BYTES:
        raise ValueError(f"keys_file {path}: has more than {_MAX_FILE_BYTES} bytes")
    try:
        text = raw.decode()
        # The loader takes the last of two equal keys in silence; a key given twice is a mistake.
        twice = _given_twice(yaml.compose(text, Loader=yaml.SafeLoader))
        data = yaml.safe_load(text)
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


def _given_twice(node: Any) -> int:
    """The line of the first key that stood there before; 0 without one."""
    seen = set()
    for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
        if isinstance(key, yaml.ScalarNode):
            if key.value in seen:
                return int(key.start_mark.line) + 1
            seen.add(key.value)
    return 0

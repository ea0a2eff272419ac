"""API keys as they are kept: by SHA-256 digest, written `sha256:HEX`, never compared as text.

A key made by `new_key` holds 256 random bits, so one round of SHA-256 hides it as well as a slow
hash would: there is no dictionary to try. Used by the settings, by the decider's table of tenants
and by `kappa keys`.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import Any

import yaml

DIGEST_PREFIX = "sha256:"

KEY_PREFIX = "sk-kappa-"

_KEY_BYTES = 32


def new_key(random: bytes) -> str:
    """A key of these random bytes, fit for a secret; `ValueError` if there are fewer than 32."""
    if len(random) < _KEY_BYTES:
        raise ValueError(f"a key needs {_KEY_BYTES} random bytes, got {len(random)}")
    return KEY_PREFIX + base64.urlsafe_b64encode(random).decode().rstrip("=")


def bearer(key: str | None) -> dict[str, str]:
    """The header that carries a key, if there is one."""
    return {"authorization": f"Bearer {key}"} if key else {}


def digest_of(key: str) -> bytes:
    """SHA-256 of a key as a client sends it; 32 bytes."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def hashed(key: str) -> str:
    """A key as a keys file holds it: `sha256:` and 64 hexadecimal digits."""
    return DIGEST_PREFIX + digest_of(key).hex()


def is_hashed(entry: str) -> bool:
    """Whether an entry is marked as a digest; `entry_fault` checks the digest itself."""
    return entry.startswith(DIGEST_PREFIX)


def entry_fault(entry: str, least_characters: int = 16) -> str | None:
    """The fault of an entry that is neither key nor digest, without its text; else None."""
    if is_hashed(entry):
        if re.fullmatch(r"[0-9a-fA-F]{64}", entry.removeprefix(DIGEST_PREFIX)):
            return None
        return (
            "is no digest: after 'sha256:' come 64 hexadecimal digits; 'kappa keys hash' prints it"
        )
    if not (entry and entry.isascii() and entry.isprintable() and " " not in entry):
        return (
            "is empty, or not plain ASCII without spaces: clients could not send it as "
            "'Authorization: Bearer KEY'"
        )
    if len(entry) < least_characters:
        return (
            f"has {len(entry)} characters, so it could be guessed: at least {least_characters}; "
            "'kappa keys new' makes one"
        )
    return None


def entry_digest(entry: str) -> bytes:
    """The digest that an entry of a keys file stands for; `ValueError` if it is neither a key nor a
    digest."""
    fault = entry_fault(entry, least_characters=0)
    if fault is not None:
        raise ValueError(f"a key {fault}")
    if is_hashed(entry):
        return bytes.fromhex(entry.removeprefix(DIGEST_PREFIX))
    return digest_of(entry)


TENANT_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"

_MAX_FILE_BYTES = 4 << 20


class KeysUnreadableError(ValueError):
    """The keys file could not be opened or read."""


def read_entries(path: str | Path) -> dict[str, Any]:
    """The file's entries as they stand there, not checked.

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
    """(line of the first repeated key, 0 if none is; the file's content)."""
    # libyaml's loader: 1,000 keys take a twentieth of the time of the one in Python.
    loader = yaml.CSafeLoader(text)
    try:
        node = loader.get_single_node()
        # The loader takes the last of two equal keys in silence; a key given twice is a mistake.
        seen: set[str] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    return int(key.start_mark.line) + 1, {}
                seen.add(key.value)
        return 0, None if node is None else loader.construct_document(node)
    finally:
        loader.dispose()

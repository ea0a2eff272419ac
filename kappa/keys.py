"""API keys as they are kept: by SHA-256 digest, written `sha256:HEX`, never compared as text.

A key made by `new_key` holds 256 random bits, so one round of SHA-256 hides it as well as a slow
hash would: there is no dictionary to try. Used by the settings, by the ingress' table of tenants
and by `kappa keys`.
"""

from __future__ import annotations

import base64
import hashlib

DIGEST_PREFIX = "sha256:"
KEY_PREFIX = "sk-kappa-"

_DIGEST_HEX = 64
_LEAST_CHARACTERS = 16
_KEY_BYTES = 32


def new_key(random: bytes) -> str:
    """A key of these random bytes, of which there must be 32 or more, fit for a secret.

    Raises:
        ValueError: they are too few.
    """
    if len(random) < _KEY_BYTES:
        raise ValueError(f"a key needs {_KEY_BYTES} random bytes, got {len(random)}")
    return KEY_PREFIX + base64.urlsafe_b64encode(random).decode().rstrip("=")


def digest_of(key: str) -> bytes:
    """SHA-256 of a key as a client sends it; 32 bytes."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def hashed(key: str) -> str:
    """A key as a keys file holds it: `sha256:` and 64 hexadecimal digits."""
    return DIGEST_PREFIX + digest_of(key).hex()


def is_hashed(entry: str) -> bool:
    """Whether an entry says that it is a digest; `entry_fault` tells if it really is one."""
    return entry.startswith(DIGEST_PREFIX)


def entry_fault(entry: str) -> str | None:
    """Why an entry must be no key and no digest of one, without its text; None if it may."""
    if not is_hashed(entry) and len(entry) < _LEAST_CHARACTERS and _form_fault(entry) is None:
        return (
            f"has {len(entry)} characters, so it could be guessed: at least {_LEAST_CHARACTERS}; "
            "'kappa keys new' makes one"
        )
    return _form_fault(entry)


def _form_fault(entry: str) -> str | None:
    if is_hashed(entry):
        digits = entry.removeprefix(DIGEST_PREFIX)
        if len(digits) == _DIGEST_HEX and all(c in "0123456789abcdef" for c in digits.lower()):
            return None
        return (
            f"is no digest: after 'sha256:' come {_DIGEST_HEX} hexadecimal digits; "
            "'kappa keys hash' prints it"
        )
    if entry and entry.isascii() and entry.isprintable() and " " not in entry:
        return None
    return (
        "is empty, or not plain ASCII without spaces: clients could not send it as "
        "'Authorization: Bearer KEY'"
    )


def entry_digest(entry: str) -> bytes:
    """The digest of an entry of a keys file: of a key in the clear, or the one that it holds.

    Raises:
        ValueError: it is neither.
    """
    fault = _form_fault(entry)
    if fault is not None:
        raise ValueError(f"a key {fault}")
    if is_hashed(entry):
        return bytes.fromhex(entry.removeprefix(DIGEST_PREFIX))
    return digest_of(entry)

"""Whose a request is: the key that it carries, looked up among digests of the configured keys.

Only digests are kept, so no key can be shown or logged, and looking one up takes as long for a
wrong key as for a right one. Without any keys everyone is the default tenant. Pure; called by the
HTTP application for every request.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kappa.report import Charge

_BEARER = "bearer "


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who is charged, and its share relative to others'."""

    name: str = "default"
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Tenants:
    """All tenants of a cluster. refuse: whether a request without a known key is turned away."""

    by_digest: Mapping[bytes, Tenant] = field(default_factory=dict, repr=False)
    default: Tenant = Tenant()
    refuse: bool = False

    @classmethod
    def of(
        cls,
        by_key: Mapping[str, str],
        weights: Mapping[str, float],
        default_name: str = "default",
        *,
        refuse: bool = False,
    ) -> Tenants:
        """From keys in the clear; they are forgotten here."""
        by_digest = {
            _digest(key): Tenant(name, weights.get(name, 1.0)) for key, name in by_key.items()
        }
        return cls(by_digest, Tenant(default_name, weights.get(default_name, 1.0)), refuse)

    def find(self, keys: Iterable[str]) -> Tenant | None:
        """The tenant of the first known one of `keys`; else the default one, or None: refuse."""
        for key in keys:
            tenant = self.by_digest.get(_digest(key))
            if tenant is not None:
                return tenant
        return None if self.refuse else self.default

    def all(self) -> dict[str, Tenant]:
        """Every tenant by name, in order of names; the default one only where it can occur."""
        found = {tenant.name: tenant for tenant in self.by_digest.values()}
        if not self.refuse:
            found.setdefault(self.default.name, self.default)
        return dict(sorted(found.items()))


def keys_sent(authorization: str, api_key: str) -> list[str]:
    """The keys in a request's headers `Authorization: Bearer KEY` and `x-api-key: KEY`."""
    bearer = authorization.strip()
    given = [bearer[len(_BEARER) :]] if bearer.lower().startswith(_BEARER) else []
    return [key for key in (*(k.strip() for k in given), api_key.strip()) if key]


def shares(tenants: Tenants, charged: Mapping[str, Charge]) -> list[dict[str, Any]]:
    """Every tenant with its weight, what it was charged, and what share of all charges that is."""
    known = tenants.all()
    everyone = Charge(*(sum(column) for column in zip(*charged.values(), strict=True)))
    rows = []
    for name in sorted({*known, *charged}):
        charge = charged.get(name, Charge())
        parts = zip(Charge._fields, charge, everyone, strict=True)
        rows.append(
            {
                "tenant": name,
                "weight": known.get(name, tenants.default).weight,
                "charged": charge._asdict(),
                "share": {
                    field.removesuffix("_s"): own / whole if whole else 0.0
                    for field, own, whole in parts
                },
            }
        )
    return rows


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()

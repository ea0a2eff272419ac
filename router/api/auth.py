"""Whose a request is: the key that it carries, looked up among digests of the configured keys.

Only digests are kept, so no key can be shown or logged. They are blinded by a secret of the process
before they are looked up: how long that takes tells nothing of any key, right or wrong. Without any
keys everyone is the default tenant. Pure.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from kappa.keys import digest_of, entry_digest

_BEARER = "bearer "


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who is charged, and its share relative to others'.

    operator: may see and do what concerns the whole cluster. own_cache: its cached prefixes are
    nobody else's (`router.api.constraints.cache_salt`).
    """

    name: str = "default"
    weight: float = 1.0
    operator: bool = True
    own_cache: bool = False


@dataclass(frozen=True, slots=True)
class Tenants:
    """All tenants of a cluster. refuse: whether a request without a known key is refused.

    by_digest: by blinded digest; blind: what blinds them, any bytes, secret. operators: who may see
    the whole cluster; None: everybody. fixed: those that a file of keys cannot take back.
    """

    by_digest: Mapping[bytes, Tenant] = field(default_factory=dict, repr=False)
    default: Tenant = Tenant()
    refuse: bool = False
    weights: Mapping[str, float] = field(default_factory=dict)
    operators: frozenset[str] | None = None
    own_caches: bool = False
    fixed: frozenset[bytes] = field(default=frozenset(), repr=False)
    blind: bytes = field(default=b"", repr=False)

    @classmethod
    def of(
        cls,
        by_key: Mapping[str, str],
        weights: Mapping[str, float],
        default_name: str = "default",
        *,
        refuse: bool = False,
    ) -> Tenants:
        """From keys in the clear or hashed; the former are forgotten here."""
        by_digest = {entry_digest(key): name for key, name in by_key.items()}
        return cls(refuse=refuse, weights=dict(weights)).with_digests(by_digest, default_name)

    def with_digests(
        self,
        by_digest: Mapping[bytes, str],
        default_name: str = "default",
        fixed: Iterable[bytes] | None = None,
    ) -> Tenants:
        """The same table with these keys. fixed: those that stay whatever a file says, by default
        all."""
        stay = frozenset(map(self._blinded, by_digest if fixed is None else fixed))
        made = replace(self, default=self._tenant(default_name), fixed=stay)
        return made.with_file(by_digest)

    def with_file(self, by_digest: Mapping[bytes, str]) -> Tenants:
        """The same with these keys of the file, instead of those that were of it before."""
        table = {self._blinded(digest): self._tenant(name) for digest, name in by_digest.items()}
        table.update({d: tenant for d, tenant in self.by_digest.items() if d in self.fixed})
        return replace(self, by_digest=table)

    def find(self, keys: Iterable[str]) -> Tenant | None:
        """The tenant of the first known one of `keys`; else the default one, or None: refuse."""
        for key in keys:
            tenant = self.by_digest.get(self._blinded(digest_of(key)))
            if tenant is not None:
                return tenant
        return None if self.refuse else self.default

    def all(self) -> dict[str, Tenant]:
        """Every tenant by name, in order of names; the default one only where it can occur."""
        found = {tenant.name: tenant for tenant in self.by_digest.values()}
        if not self.refuse:
            found.setdefault(self.default.name, self.default)
        return dict(sorted(found.items()))

    def _blinded(self, digest: bytes) -> bytes:
        return hmac.digest(self.blind, digest, "sha256")

    def _tenant(self, name: str) -> Tenant:
        operator = self.operators is None or name in self.operators
        return Tenant(name, self.weights.get(name, 1.0), operator, self.own_caches)


def keys_in(authorization: str, api_key: str) -> list[str]:
    """The keys in a request's headers `Authorization: Bearer KEY` and `x-api-key: KEY`."""
    bearer = authorization.strip()
    given = bearer[len(_BEARER) :] if bearer.lower().startswith(_BEARER) else ""
    return [key for key in (given.strip(), api_key.strip()) if key]

"""Whose cached prefixes a request may find: its tenant's own, unless tenants share a cache.

An engine that reuses another tenant's prefix answers sooner, and by that tells what the other
asked. So the tenant's name goes into the salt of every prefix hash, the engine's and the router's
alike. A client's own `cache_salt` divides its tenant's cache further and can never leave it. Pure.
"""

from __future__ import annotations

import hashlib

from router.access.tenants import Tenant


def cache_salt(tenant: Tenant, own: str | None) -> str | None:
    """The salt of a request of `tenant` that asked for the salt `own`; None: there is none.

    The same at every start and every ingress, so that caches which outlive them stay of use.
    Whoever knows it gains nothing: what a client sends is hashed in, never taken for the result.
    """
    if not tenant.own_cache:
        return own or None
    name, given = tenant.name.encode(), (own or "").encode(errors="surrogatepass")
    # The length keeps apart tenant and salt, wherever one ends and the other begins.
    told = len(name).to_bytes(4, "little") + name + given
    return hashlib.blake2b(told, digest_size=16, person=b"kappa-tenant").hexdigest()

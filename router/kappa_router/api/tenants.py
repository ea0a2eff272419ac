"""The tenant of a request, and how much it may ask for: keys, token buckets, places.

Only digests of keys are kept, so none can be shown or logged. They are blinded by a secret of the
process before they are looked up: how long that takes tells nothing of any key. Without keys
everyone is the default tenant. Pure: each call takes the time, in seconds of a clock that does not
jump.
"""

from __future__ import annotations

import hmac
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from kappa.keys import digest_of
from kappa_router.api import errors
from kappa_router.api.errors import ApiError

REQUEST_BYTES = 1 << 20
"""A longer body counts as several requests: it takes as much longer to read."""
_BEARER = "bearer "
_MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant, and its share relative to others'."""

    name: str = "default"
    weight: float = 1.0
    # It may see and do what concerns the whole cluster.
    operator: bool = True
    # No other tenant reads its cached prefixes (`kappa_router.api.request.cache_salt`).
    own_cache: bool = False
    # Its requests' class; lower goes first.
    priority: int = 0
    # Classes that one of its requests may ask for instead.
    may_ask: tuple[int, ...] = ()

    def class_of(self, requested: int | None, where: str = "priority") -> int:
        """The class of a request that names one, or none; ApiError 400 if it may not. where: the
        place that names it."""
        if requested is None or requested == self.priority:
            return self.priority
        if requested not in self.may_ask:
            known = ", ".join(map(str, sorted({self.priority, *self.may_ask})))
            why = f"it is {requested}, and tenant {self.name!r} may ask for {known}"
            raise errors.bad_field(where, why)
        return requested


EVERYBODY = Tenant()
"""Where there are no keys."""


@dataclass(frozen=True, slots=True)
class Tenants:
    """All tenants of a cluster."""

    # By the blinded digests of their keys.
    by_digest: Mapping[bytes, Tenant] = field(default_factory=dict, repr=False)
    # Of requests without a known key, unless these are refused.
    default: Tenant = EVERYBODY
    refuse: bool = False
    # By tenant; 1 where there is none.
    weights: Mapping[str, float] = field(default_factory=dict)
    # By tenant: its class, and those that it may ask for.
    priorities: Mapping[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    # Who may see the whole cluster; None: everybody.
    operators: frozenset[str] | None = None
    own_caches: bool = False
    # By tenant: whom its requests may be for instead, as a gateway names them.
    speaks_for: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Blinded digests that a file of keys cannot take back.
    fixed: frozenset[bytes] = field(default=frozenset(), repr=False)
    # Blinds the digests: any bytes, secret.
    blind: bytes = field(default=b"", repr=False)

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
        """The same with these keys of the file instead of its earlier ones."""
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

    @property
    def apart(self) -> bool:
        """Whether requests of several tenants can be told apart."""
        return bool(self.by_digest or self.speaks_for)

    def named(self, caller: Tenant, fairness_id: str) -> Tenant:
        """The tenant of a request of `caller` with that fairness header; it gains no rights of an
        operator. ApiError 403 if it is not the caller's to name; where there is one tenant only, no
        name changes anything."""
        if not self.apart or fairness_id in ("", caller.name):
            return caller
        if fairness_id not in self.speaks_for.get(caller.name, ()):
            raise errors.FOREIGN_TENANT(tenant=caller.name)
        tenant = self._tenant(fairness_id)
        return replace(tenant, operator=tenant.operator and caller.operator)

    def all(self) -> dict[str, Tenant]:
        """Every tenant by name, in order of names; the default one only where it can occur."""
        found = {name: self._tenant(name) for one in self.speaks_for.values() for name in one}
        found |= {tenant.name: tenant for tenant in self.by_digest.values()}
        if not self.refuse:
            found.setdefault(self.default.name, self.default)
        return dict(sorted(found.items()))

    def _blinded(self, digest: bytes) -> bytes:
        return hmac.digest(self.blind, digest, "sha256")

    def _tenant(self, name: str) -> Tenant:
        operator = self.operators is None or name in self.operators
        classes = self.priorities.get(name, (0, ()))
        return Tenant(name, self.weights.get(name, 1.0), operator, self.own_caches, *classes)


def keys_in(authorization: str, api_key: str) -> list[str]:
    """The keys in a request's headers `Authorization: Bearer KEY` and `x-api-key: KEY`."""
    bearer = authorization.strip()
    given = bearer[len(_BEARER) :] if bearer.lower().startswith(_BEARER) else ""
    return [key for key in (given.strip(), api_key.strip()) if key]


# -- requests and tokens a minute -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Allowance:
    """The limits of one tenant; None: no limit. Tokens are prompt and generated ones."""

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    concurrent: int | None = None


@dataclass(slots=True)
class Bucket:
    """The rest of a minute's allowance; it fills steadily, and is below zero while in debt."""

    per_minute: float
    level: float
    at_s: float

    @property
    def capacity(self) -> float:
        """The content of a full one; at least one, or nothing could ever be taken."""
        return max(self.per_minute, 1.0)

    def refill(self, now_s: float) -> None:
        """Let time pass; a clock that runs backwards gives nothing and takes nothing."""
        gained = max(now_s - self.at_s, 0.0) * self.per_minute / _MINUTE_S
        self.level, self.at_s = min(self.level + gained, self.capacity), now_s

    def wait_s(self, amount: float) -> float:
        """Seconds until `amount` is there, or until it is full; 0 if it is there now."""
        return max(min(amount, self.capacity) - self.level, 0.0) * _MINUTE_S / self.per_minute


@dataclass(slots=True)
class _Meter:
    """The rest of a tenant's allowance here, and its open requests."""

    requests: Bucket | None
    tokens: Bucket | None
    concurrent: int | None
    open: int = 0


@dataclass(slots=True)
class Lease:
    """One request's hold on its tenant's allowance, from its head to the end of its answer."""

    tenant: str
    _meter: _Meter
    # An engine worked for it although it was not served, since its client would not wait.
    worked: bool = False
    _requests: int = 0
    _reserved: float = 0.0
    _used: float = 0.0
    _open: bool = True

    def received(self, size_bytes: int, now_s: float) -> None:
        """Take what a body of that size counts as, a request for each MiB, begun ones too, and at
        least one; a second time instead of the first. Raises ApiError 429, and then takes no more
        than before."""
        bucket, wanted = self._meter.requests, max(-(-size_bytes // REQUEST_BYTES), 1)
        if bucket is None or wanted <= self._requests:
            return
        bucket.refill(now_s)
        bucket.level += self._requests
        try:
            _take(bucket, float(wanted), errors.REQUESTS_OVER_RATE, self.tenant)
        except ApiError:
            bucket.level -= self._requests
            raise
        self._requests = wanted

    def reserve(self, prompt_tokens: int, max_tokens: int, now_s: float) -> None:
        """Take what the request may come to; a second time instead of the first. Raises ApiError
        429, the tenant has used its tokens, or 400, no minute allows that many."""
        bucket = self._meter.tokens
        self._used = float(prompt_tokens)
        if bucket is None or not self._open:
            return
        bucket.refill(now_s)
        bucket.level += self._reserved
        self._reserved = 0.0
        wanted = float(prompt_tokens + max_tokens)
        if wanted > bucket.capacity:
            raise errors.REQUEST_OVER_LIMIT(
                tokens=int(wanted), tenant=self.tenant, per_minute=bucket.capacity
            )
        _take(bucket, wanted, errors.TOKENS_OVER_RATE, self.tenant)
        self._reserved = wanted

    def generated(self, tokens: int) -> None:
        self._used += tokens

    def counted(self, prompt_tokens: int) -> None:
        """An engine counted the prompt, which was only estimated."""
        self._used = float(prompt_tokens)

    def close(self, now_s: float, *, served: bool) -> None:
        """The request is over: settle what was taken against what was used. Idempotent.

        served: whether it was answered; one that was refused pays no tokens, unless it `worked`.
        """
        if not self._open:
            return
        self._open = False
        self._meter.open -= 1
        bucket = self._meter.tokens
        if bucket is not None:
            bucket.refill(now_s)
            bucket.level += self._reserved - (self._used if served or self.worked else 0.0)
            bucket.level = min(bucket.level, bucket.capacity)


@dataclass(slots=True)
class TenantLimiter:
    """Every tenant's allowance and what it has left; each of several deciders grants its share."""

    default: Allowance = Allowance()
    by_tenant: Mapping[str, Allowance] = field(default_factory=dict)
    replicas: int = 1
    _meters: dict[str, _Meter] = field(default_factory=dict)

    def enter(self, tenant: str, now_s: float, size_bytes: int = 0) -> Lease:
        """A request of `tenant` came; size_bytes: of its body, if it is announced. Raises ApiError
        429 if the tenant has used its requests, or has as many open as it may."""
        meter = self._meter(tenant, now_s)
        if meter.concurrent is not None and meter.open >= meter.concurrent:
            raise errors.TOO_MANY_AT_ONCE(tenant=tenant, limit=meter.concurrent)
        lease = Lease(tenant, meter)
        lease.received(size_bytes, now_s)
        meter.open += 1
        return lease

    def check(self, tenant: str, now_s: float, size_bytes: int = 0) -> None:
        """As `enter`, of a request that is to come: nothing is taken."""
        lease, meter = self.enter(tenant, now_s, size_bytes), self._meters[tenant]
        lease.close(now_s, served=False)
        if meter.requests is not None:
            meter.requests.level += lease._requests

    def headers(self, tenant: str, now_s: float) -> dict[str, str]:
        """`x-ratelimit-*` as OpenAI names and writes them, of the limits that `tenant` has."""
        meter, headers = self._meter(tenant, now_s), {}
        for name, bucket in (("requests", meter.requests), ("tokens", meter.tokens)):
            if bucket is not None:
                headers[f"x-ratelimit-limit-{name}"] = str(int(bucket.capacity))
                headers[f"x-ratelimit-remaining-{name}"] = str(max(int(bucket.level), 0))
                headers[f"x-ratelimit-reset-{name}"] = duration(bucket.wait_s(bucket.capacity))
        return headers

    def _meter(self, tenant: str, now_s: float) -> _Meter:
        meter = self._meters.get(tenant)
        if meter is None:
            given = self.by_tenant.get(tenant, self.default)
            rates = (given.requests_per_minute, given.tokens_per_minute)
            requests, tokens = (None if rate is None else rate / self.replicas for rate in rates)
            # Requests at a time are rounded up, so that there is at least one.
            at_once = None if given.concurrent is None else -(-given.concurrent // self.replicas)
            meter = _Meter(_full(requests, now_s), _full(tokens, now_s), at_once)
            self._meters[tenant] = meter
        for bucket in (meter.requests, meter.tokens):
            if bucket is not None:
                bucket.refill(now_s)
        return meter


def _full(per_minute: float | None, now_s: float) -> Bucket | None:
    return None if per_minute is None else Bucket(per_minute, max(per_minute, 1.0), now_s)


def _take(bucket: Bucket, amount: float, fault: errors.Fault, tenant: str) -> None:
    wait_s = bucket.wait_s(amount)
    if wait_s > 0:
        raise fault(
            tenant=tenant, per_minute=bucket.per_minute, wait_s=wait_s, retry_after_s=wait_s
        )
    bucket.level -= amount


def duration(seconds: float) -> str:
    """Seconds as OpenAI writes them: `350ms`, `7s`, `6m0s`, `1h2m3s`; rounded up."""
    millis = -int(-1000 * seconds // 1)
    if millis < 1000:
        return f"{millis}ms"
    minutes, left_s = divmod(-(-millis // 1000), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{left_s}s"
    return f"{minutes}m{left_s}s" if minutes else f"{left_s}s"


# -- places -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Places:
    """A bounded number of places, of which no tenant takes them from another.

    While places are free anybody gets one. When they are all taken, a tenant with less than its
    share of them still gets one, above the bound: those of others run and cannot be taken back. So
    a tenant below its share is never refused for what other tenants hold. Equal tenants that come
    one after the other, each filling what it may, hold at most `limit * (1 + 1/2 + ... + 1/n)`.
    """

    limit: int
    # Tenants can be told apart; if not, the bound is all there is.
    shared: bool = True
    _held: dict[Hashable, Tenant] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._held)

    def take(self, holder: Hashable, tenant: Tenant, elsewhere: int = 0) -> bool:
        """Take a place for `holder` until it leaves; False: it gets none. elsewhere: places taken
        at other deciders."""
        full = len(self._held) + elsewhere >= self.limit
        if full and (not self.shared or self._has_its_share(tenant, elsewhere)):
            return False
        self._held[holder] = tenant
        return True

    def leave(self, holder: Hashable) -> None:
        """Give a place back; harmless for one that holds none."""
        self._held.pop(holder, None)

    def _has_its_share(self, tenant: Tenant, elsewhere: int) -> bool:
        """Whether one more place would be above the part of all places that a tenant's weight is
        of the weights of all that hold one; at least one is everybody's. Places elsewhere are taken
        to be spread as those here."""
        here, tenants = len(self._held), [*self._held.values(), tenant]
        weights = {one.name: one.weight for one in tenants}
        own = Counter(one.name for one in tenants)[tenant.name] - 1
        share = self.limit * tenant.weight / sum(weights.values())
        return own * (1 + elsewhere / here if here else 1.0) + 1 > max(share, 1.0)

"""How much a tenant may ask for: requests and tokens a minute, requests at a time, its share of
places.

A token bucket holds what a minute allows and fills steadily. A request takes one from the first
bucket before its body is read, and its prompt and `max_tokens` from the second once they are known;
when it ends, what it did not use goes back. Of several ingress replicas each grants its share.
Pure: each call takes the time, in seconds of a clock that does not jump.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from router.api.auth import Tenant
from router.api.errors import over_rate, request_over_limit, too_many_at_once

_MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class Allowance:
    """What one tenant may ask for; None: no limit. Tokens are prompt and generated ones."""

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    concurrent: int | None = None

    def shared(self, replicas: int) -> Allowance:
        """One of so many replicas' part. Requests at a time are rounded up, to at least one."""

        def part(whole: float | None) -> float | None:
            return None if whole is None else whole / replicas

        at_once = self.concurrent
        return Allowance(
            part(self.requests_per_minute),
            part(self.tokens_per_minute),
            None if at_once is None else -(-at_once // replicas),
        )


@dataclass(slots=True)
class Bucket:
    """What is left of a minute's allowance; never more than that, and below zero while in debt."""

    per_minute: float
    level: float
    at_s: float

    @property
    def capacity(self) -> float:
        """What a full one holds; at least one, or nothing could ever be taken."""
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
    """A tenant's buckets and its open requests."""

    allowance: Allowance
    requests: Bucket | None
    tokens: Bucket | None
    open: int = 0

    def refill(self, now_s: float) -> None:
        for bucket in (self.requests, self.tokens):
            if bucket is not None:
                bucket.refill(now_s)


@dataclass(slots=True)
class Lease:
    """One request's hold on its tenant's allowance, from its head to the end of its answer.

    worked: an engine worked for it although it was not served, since its client would not wait.
    """

    tenant: str
    _meter: _Meter
    worked: bool = False
    _reserved: float = 0.0
    _used: float = 0.0
    _open: bool = True

    def reserve(self, prompt_tokens: int, max_tokens: int, now_s: float) -> None:
        """Take what the request may come to; a second time instead of the first.

        Raises:
            ApiError: 429, the tenant has used its tokens; or 400, no minute allows so many.
        """
        bucket = self._meter.tokens
        self._used = float(prompt_tokens)
        if bucket is None or not self._open:
            return
        bucket.refill(now_s)
        bucket.level += self._reserved
        self._reserved = 0.0
        wanted = float(prompt_tokens + max_tokens)
        if wanted > bucket.capacity:
            raise request_over_limit(self.tenant, int(wanted), bucket.capacity)
        wait_s = bucket.wait_s(wanted)
        if wait_s > 0:
            raise over_rate(self.tenant, "tokens", bucket.per_minute, wait_s)
        bucket.level -= wanted
        self._reserved = wanted

    def generated(self, tokens: int) -> None:
        self._used += tokens

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
    """Every tenant's allowance and what it has left, in one ingress replica."""

    default: Allowance = Allowance()
    by_tenant: Mapping[str, Allowance] = field(default_factory=dict)
    replicas: int = 1
    _meters: dict[str, _Meter] = field(default_factory=dict)

    def enter(self, tenant: str, now_s: float) -> Lease:
        """A request of `tenant` came.

        Raises:
            ApiError: 429, it has used its requests, or has as many open as it may.
        """
        meter = self._meter(tenant, now_s)
        at_once = meter.allowance.concurrent
        if at_once is not None and meter.open >= at_once:
            raise too_many_at_once(tenant, at_once)
        bucket = meter.requests
        if bucket is not None:
            wait_s = bucket.wait_s(1.0)
            if wait_s > 0:
                raise over_rate(tenant, "requests", bucket.per_minute, wait_s)
            bucket.level -= 1.0
        meter.open += 1
        return Lease(tenant, meter)

    def open(self, tenant: str) -> int:
        meter = self._meters.get(tenant)
        return 0 if meter is None else meter.open

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
            meter = self._meters[tenant] = self._new_meter(tenant, now_s)
        meter.refill(now_s)
        return meter

    def _new_meter(self, tenant: str, now_s: float) -> _Meter:
        allowance = self.by_tenant.get(tenant, self.default).shared(self.replicas)
        return _Meter(
            allowance,
            _full(allowance.requests_per_minute, now_s),
            _full(allowance.tokens_per_minute, now_s),
        )


def _full(per_minute: float | None, now_s: float) -> Bucket | None:
    return None if per_minute is None else Bucket(per_minute, max(per_minute, 1.0), now_s)


def duration(seconds: float) -> str:
    """Seconds as OpenAI writes them: `350ms`, `7s`, `6m0s`, `1h2m3s`; rounded up."""
    millis = -int(-1000 * seconds // 1)
    if millis < 1000:
        return f"{millis}ms"
    whole = -(-millis // 1000)
    minutes, left_s = divmod(whole, 60)
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

    shared: whether tenants can be told apart; if not, the bound is all there is.
    """

    limit: int
    shared: bool = True
    _held: dict[Hashable, Tenant] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._held)

    def take(self, holder: Hashable, tenant: Tenant, elsewhere: int = 0) -> bool:
        """Take a place for `holder` until it leaves; False: it gets none. elsewhere: places taken
        at other ingresses."""
        if len(self._held) + elsewhere >= self.limit and self._refused(tenant, elsewhere):
            return False
        self._held[holder] = tenant
        return True

    def leave(self, holder: Hashable) -> None:
        """Give a place back; harmless for one that holds none."""
        self._held.pop(holder, None)

    def _refused(self, tenant: Tenant, elsewhere: int) -> bool:
        if not self.shared:
            return True
        held = Counter(one.name for one in self._held.values())
        weights = {one.name: one.weight for one in (*self._held.values(), tenant)}
        return over_share(held, weights, tenant.name, self.limit, elsewhere)


def over_share(
    open_by_tenant: Mapping[str, int],
    weights: Mapping[str, float],
    tenant: str,
    limit: int,
    elsewhere: int = 0,
) -> bool:
    """Whether one more request of `tenant` is refused.

    A tenant's share is the part of `limit` that its weight is of all tenants' that have requests
    open, its own among them, and at least one place.

    open_by_tenant: requests open here; weights: of them and of `tenant`; elsewhere: requests open
    at other ingresses, whose tenants are not known here: taken to be spread as those here are.
    """
    here = sum(open_by_tenant.values())
    if here + elsewhere < limit:
        return False
    own = open_by_tenant.get(tenant, 0) * (1 + elsewhere / here if here else 1.0)
    active = {name for name, count in open_by_tenant.items() if count} | {tenant}
    share = limit * weights[tenant] / sum(weights[name] for name in active)
    return own + 1 > max(share, 1.0)

"""Tenants with their keys, shares and limits, and the address that the endpoint listens at."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, PrivateAttr, SecretStr, field_validator, model_validator

from kappa.keys import entry_digest, entry_fault, is_hashed, read_digests, read_entries
from kappa.protocol import MAX_TENANTS
from kappa.settings.base import Finite, PriorityClass, Section, TenantName


class TenantLimits(Section):
    """Limits on one tenant; those left out do not apply."""

    requests_per_minute: Finite | None = Field(None, gt=0)
    tokens_per_minute: Finite | None = Field(
        None, gt=0, description="prompt and generated tokens together"
    )
    concurrent: int | None = Field(None, ge=1, description="requests open at a time")


class TenantClasses(Section):
    """A tenant's classes of priority; lower classes go first."""

    own: PriorityClass = 0
    # Classes that a request may choose by its field `priority`.
    may_ask: tuple[PriorityClass, ...] = ()


class TenantSettings(Section):
    """Tenants: their keys, shares and limits. Without keys everyone is the default tenant."""

    # Secret key, or `sha256:` and its digest -> tenant; a tenant may have several.
    by_key: dict[SecretStr, TenantName] = Field(default_factory=dict)
    # The same in a YAML file of its own (`key: tenant`, one per line), so that the settings hold no
    # secret; the decider reads it again when it changes.
    keys_file: str | None = None
    keys_check_s: Finite = Field(
        2.0, gt=0, le=3600, description="how often the decider looks whether keys_file has changed"
    )
    # Shares.
    weights: dict[TenantName, Annotated[Finite, Field(gt=0)]] = Field(default_factory=dict)
    priorities: dict[TenantName, TenantClasses] = Field(
        default_factory=dict, description="who goes first; 0 and no other for those not named"
    )
    unknown: Literal["default", "refuse"] = Field(
        "default", description="requests without a known key: the default tenant's, or 401"
    )
    default_name: TenantName = "default"
    default_limits: TenantLimits = Field(
        default_factory=TenantLimits, description="of each tenant that limits does not name"
    )
    limits: dict[TenantName, TenantLimits] = Field(default_factory=dict)
    operators: tuple[TenantName, ...] = Field(
        (), description="tenants who may see nodes, tenants and all decisions, and measure nodes"
    )
    # As {edge: [a, b]}: a request with the key of `edge` may be for a or b, which need no keys.
    speaks_for: dict[TenantName, tuple[TenantName, ...]] = Field(
        default_factory=dict,
        description="tenants, such as a gateway's, whose requests may name one of these by the "
        "header x-gateway-inference-fairness-id; default_name for requests without a key",
    )
    share_cache: bool = Field(
        False, description="tenants reuse each other's cached prefixes, and may notice by timing"
    )

    _of_file: dict[bytes, str] = PrivateAttr(default_factory=dict)
    _in_clear: int = PrivateAttr(default=0)

    @field_validator("by_key")
    @classmethod
    def _keys_can_be_sent(cls, value: dict[SecretStr, str]) -> dict[SecretStr, str]:
        found: dict[bytes, str] = {}
        for key, tenant in value.items():
            fault = entry_fault(key.get_secret_value())
            if fault is not None:
                raise ValueError(f"a key of {tenant!r} {fault}")
            if found.setdefault(entry_digest(key.get_secret_value()), tenant) != tenant:
                raise ValueError(
                    f"one key is given to two tenants, {tenant!r} among them, once by its digest"
                )
        return value

    @model_validator(mode="after")
    def _with_the_file(self) -> TenantSettings:
        entries = [key.get_secret_value() for key in self.by_key]
        if self.keys_file is not None:
            self._of_file = read_digests(self.keys_file)
            entries += read_entries(self.keys_file)
        self._in_clear = sum(not is_hashed(entry) for entry in set(entries))
        given = self._given()
        if any(given[key] != self._of_file[key] for key in given.keys() & self._of_file.keys()):
            raise ValueError(
                f"by_key and {self.keys_file} give one key to two tenants: drop it from one"
            )
        speakers = {*self.digests.values(), self.default_name}
        known = speakers.union(*self.speaks_for.values())
        if len(known) > MAX_TENANTS:
            raise ValueError(f"{len(known)} tenants: at most {MAX_TENANTS} are kept apart")
        for field in ("weights", "limits", "priorities", "operators", "speaks_for"):
            allowed = speakers if field == "speaks_for" else known
            strangers = sorted(set(getattr(self, field)) - allowed)
            if strangers:
                raise ValueError(
                    f"{field} names {strangers}, who have no key; known are {sorted(allowed)[:20]}"
                )
        if self.unknown == "refuse" and not self.digests:
            raise ValueError("unknown: refuse needs keys: give by_key or keys_file")
        return self

    def _given(self) -> dict[bytes, str]:
        return {entry_digest(key.get_secret_value()): name for key, name in self.by_key.items()}

    def weight(self, tenant: str) -> float:
        """A tenant's share, 1 unless set."""
        return self.weights.get(tenant, 1.0)

    @property
    def closed(self) -> bool:
        """Whether requests without a known key are refused."""
        return self.unknown == "refuse"

    @property
    def digests(self) -> Mapping[bytes, str]:
        """Digest of each key -> tenant; the file's keys are those at the time of reading."""
        return self._of_file | self._given()

    @property
    def fixed_digests(self) -> frozenset[bytes]:
        """Digests of the keys in the settings, which stay valid when the file changes."""
        return frozenset(self._given())

    @property
    def keys_in_clear(self) -> int:
        """The number of keys stored as clients send them, which deserves a warning."""
        return self._in_clear


class AccessSettings(Section):
    """Bounds on any client, before its tenant is known."""

    allow_open: bool = Field(
        False, description="listen beyond loopback although anybody may ask there without a key"
    )
    open_metrics: bool = Field(True, description="GET /metrics needs no key; false: an operator's")
    max_headers: int = Field(100, ge=16, le=10_000)
    max_header_bytes: int = Field(
        32 << 10, ge=4096, description="names and values of all headers together; above: 431"
    )
    body_timeout_s: Finite = Field(
        30.0, gt=0, description="a body that takes longer to arrive is refused (408)"
    )


class TlsSettings(Section):
    """Files in PEM: the endpoint's certificate with its chain, and its private key without a
    password. A new pair moved into their place is used without a restart."""

    cert: str = Field(min_length=1)
    key: str = Field(min_length=1)


class HttpSettings(Section):
    """The endpoint's address, TLS and number of deciders."""

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535, description="0 picks a free port")
    replicas: int = Field(
        1,
        ge=1,
        le=64,
        description="routers; one that dies takes no open stream along with envoy, else its own",
    )
    tls: TlsSettings | None = Field(None, description="null: it speaks plain HTTP")

    @property
    def loopback(self) -> bool:
        """Whether only this machine can connect; False for any name but localhost."""
        if self.host.lower() == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return False


def open_door(tenants: TenantSettings, access: AccessSettings, http: HttpSettings) -> str | None:
    """The reason not to open this endpoint as it is, with the remedy; None if it may be opened."""
    if http.loopback or tenants.closed or access.allow_open:
        return None
    return (
        f"listens on {http.host}, beyond this machine, and serves anybody without a key: give "
        "tenants.keys_file and tenants.unknown: refuse, or say access.allow_open: true "
        "(--allow-open) if a proxy or network policy guards it"
    )

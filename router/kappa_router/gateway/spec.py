"""The specification of a front door: its address, its bounds for clients, and its servers.

`bootstrap` and `endpoints` render it for Envoy, the decider speaks to Envoy by the sockets and
paths that are named here, `kappa serve` and `kappa route` fill it in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

# Paths under which Envoy asks the decider: about the head of a request with a large or chunked
# body, and about a whole request, each followed by the client's own path and query; and whether a
# request that a server has failed may go to the next of its list, followed by its id.
ADMIT, DECIDE, AGAIN = "/admit", "/decide", "/again/"
# The path under which the first bytes of a foreign server's answer come, with its id, and the
# header with the server that the answer names. Its last bytes come in Envoy's log.
FIRST, TOLD_HEADER = "/first/", "x-kappa-from"
TAIL_BYTES = 4096
# Of Envoy's own, by which the decider says how often, for how long at a server, and after which
# answers besides the usual ones a request is tried.
RETRIES_HEADER = "x-envoy-max-retries"
TRY_HEADER = "x-envoy-upstream-rq-per-try-timeout-ms"
STATUSES_HEADER = "x-envoy-retriable-status-codes"
OF_ENVOY = (RETRIES_HEADER, TRY_HEADER, STATUSES_HEADER)
# Envoy takes the headers that it names off the request.
REMOVED_HEADER = "x-envoy-auth-headers-to-remove"
# The servers that alone a gateway lets its endpoint picker choose, by comma; a client's own header
# of that name does not reach the decider.
SUBSET_HEADER = "x-gateway-destination-endpoint-subset"
# Of a request: the number of the decider that decided it, and the socket of the one that let its
# body come, which has room for it.
SLOT_HEADER, ADMITTER_HEADER = "x-kappa-to-slot", "x-kappa-to-admitter"
# Names of Envoy's logs: of requests that ended, and of attempts that failed.
REQUESTS, ATTEMPTS = "requests", "attempts"
# How often Envoy tells of a request that goes on.
GOES_ON_S = 30.0


def veiled(status: int) -> int:
    """A refusal's status as the decider tells it to Envoy, which takes a 5xx for a failure of the
    decider, and gives the client the one that was meant (`kappa_router.gateway.replies`)."""
    return status - 10 if status >= 500 else status


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM: the certificate with its chain, and its private key. A new pair is taken
    without a restart when it is renamed into the place of the old one."""

    cert: Path
    key: Path


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds for a client; a header is a name and its value."""

    headers: int = 100
    header_bytes: int = 32 << 10
    body_bytes: int = 64 << 20
    header_s: float = 10.0
    body_s: float = 30.0
    # A connection without a request; a request or answer without a byte in either direction.
    idle_s: float = 60.0
    silent_s: float = 600.0
    connect_s: float = 2.0
    # A connection to a server on a machine that acknowledges nothing.
    lost_s: float = 10.0
    # The decider's own bound ends its waiting sooner; this one is for a decider that hangs.
    decide_s: float = 60.0
    connections: int = 10_000
    # Requests are refused when Envoy's heap comes near this.
    heap_bytes: int = 1 << 30


class _Inside:
    """A file's path inside its owner's folder; name: a format of the owner's fields."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, owner: DeciderSlot | GatewaySpec, kind: type) -> Path:
        return owner.folder / self._name.format(owner)


@dataclass(frozen=True, slots=True)
class DeciderSlot:
    """The place of one of a front door's deciders: a process takes it for as long as it lives, and
    the next one after it."""

    folder: Path
    # From 0 on.
    number: int

    # The decider's: `authz` over HTTP/1.1, first bytes and tails.
    decider_socket = _Inside("decider-{0.number}.sock")
    # Of the application that answers `GatewaySpec.own`.
    face_socket = _Inside("face-{0.number}.sock")
    # Where Envoy logs how the requests ended that were decided here.
    events_socket = _Inside("events-{0.number}.sock")
    # Held by the decider that has it.
    lock_file = _Inside("decider-{0.number}.lock")


@dataclass(frozen=True, slots=True)
class GatewaySpec:
    """One front door."""

    # Private to it (mode 0700), with all that it reads and writes; its path must leave room for a
    # socket's name in 107 bytes.
    folder: Path
    host: str
    port: int
    # Paths about which the decider is asked, exact.
    decided: tuple[str, ...]
    # Our own paths, exact; one that ends in / stands for one or two segments that follow.
    own: tuple[str, ...]
    tls: Tls | None = None
    # The servers are somebody else's, so Envoy itself tells the decider of first bytes and tails.
    foreign: bool = False
    # The header of their answers that names the server; empty: none does.
    from_header: str = ""
    # What becomes of decided paths while no decider is there.
    decider_away: Literal["refuse", "least_request"] = "refuse"
    # Verifies the certificates of servers with TLS; without it they cannot be reached.
    ca: Path | None = None
    bounds: Bounds = field(default_factory=Bounds)
    # How many there may be at a time.
    deciders: int = 1

    # Of Envoy's administration interface, for this user alone.
    admin_socket = _Inside("admin.sock")
    # Envoy's configuration.
    bootstrap_file = _Inside("envoy.json")
    # Which certificate and key Envoy shows.
    certificate_file = _Inside("certificate.json")
    # Where `endpoints` writes and Envoy watches, in a folder of its own.
    endpoints_file = _Inside("endpoints/endpoints.json")
    # Held by the decider that writes `endpoints_file` for all.
    writer_lock_file = _Inside("endpoints.lock")

    @property
    def scheme(self) -> str:
        """The scheme by which clients reach it."""
        return "http" if self.tls is None else "https"

    @property
    def url(self) -> str:
        """The address where it listens."""
        return f"{self.scheme}://{self.host}:{self.port}"

    @property
    def slots(self) -> tuple[DeciderSlot, ...]:
        """A place for each decider."""
        return tuple(DeciderSlot(self.folder, number) for number in range(self.deciders))


@dataclass(frozen=True, slots=True)
class ServerEndpoint:
    """A server as Envoy reaches it. All servers are in one cluster, so that a request may go on to
    any other of its list, whatever its scheme, prefix or key.

    No other server sees its secret, prefix and key.
    """

    worker: str
    # An IP address; names are resolved before (`endpoints.Resolver`).
    host: str
    port: int
    # The host's name, in `host`, SNI and certificate; empty: `host`.
    name: str = ""
    tls: bool = False
    # Requests may go there while no decider can be asked (`decider_away`).
    open: bool = True
    # Of one of our own workers.
    secret: str = ""
    # Of a foreign server: put before the client's path, and sent in the place of its key.
    prefix: str = ""
    key: str = ""

    @property
    def address(self) -> str:
        """Its name in the decider's list (`ENDPOINT_HEADER`)."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

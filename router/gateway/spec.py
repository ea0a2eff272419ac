"""What a front door is made from: where it listens, whom it lets in how far, and its servers.

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
# Paths under which the first bytes and the last of a foreign server's answer come, with its id.
FIRST, TAIL = "/first/", "/tail/"
TAIL_BYTES = 4096
# With both: how many events there were so far as they were counted, and whom the answer names.
EVENTS_HEADER, TOLD_HEADER = "x-kappa-events", "x-kappa-from"
# Of Envoy's own, by which the decider says how often, for how long at a server, and after which
# answers besides the usual ones a request is tried.
RETRIES_HEADER = "x-envoy-max-retries"
TRY_HEADER = "x-envoy-upstream-rq-per-try-timeout-ms"
STATUSES_HEADER = "x-envoy-retriable-status-codes"
OF_ENVOY = (RETRIES_HEADER, TRY_HEADER, STATUSES_HEADER)
# Of a request: the number of the decider that decided it, and the socket of the one that let its
# body come, which has room for it.
SLOT_HEADER, ADMITTER_HEADER = "x-kappa-to-slot", "x-kappa-to-admitter"
# Names of Envoy's logs: of requests that ended, and of attempts that failed.
REQUESTS, ATTEMPTS = "requests", "attempts"
# How often Envoy tells of a request that goes on.
GOES_ON_S = 30.0


def veiled(status: int) -> int:
    """A refusal's status as the decider tells it to Envoy, which takes a 5xx for a failure of the
    decider, and gives the client the one that was meant (`router.gateway.replies`)."""
    return status - 10 if status >= 500 else status


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM: the certificate with its chain, and its private key. A new pair is taken
    without a restart when it is renamed into the place of the old one."""

    cert: Path
    key: Path


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a client may cost; a header is a name and its value."""

    headers: int = 100
    header_bytes: int = 32 << 10
    body_bytes: int = 64 << 20
    header_s: float = 10.0
    body_s: float = 30.0
    # A connection without a request; a request or answer without a byte in either direction.
    idle_s: float = 60.0
    silent_s: float = 600.0
    connect_s: float = 2.0
    # A connection to a server whose machine acknowledges nothing.
    lost_s: float = 10.0
    # The decider's own bound ends its waiting sooner; this one is for a decider that hangs.
    decide_s: float = 60.0
    connections: int = 10_000
    # Requests are refused when Envoy's heap comes near this.
    heap_bytes: int = 1 << 30


@dataclass(frozen=True, slots=True)
class DeciderSlot:
    """Where one of a front door's deciders is reached: a place that a process takes for as long as
    it lives, and the next after it. number: from 0 on."""

    folder: Path
    number: int

    @property
    def decider_socket(self) -> Path:
        """The decider's: `authz` over HTTP/1.1, first bytes and tails."""
        return self.folder / f"decider-{self.number}.sock"

    @property
    def face_socket(self) -> Path:
        """Of the application that answers `GatewaySpec.own`."""
        return self.folder / f"face-{self.number}.sock"

    @property
    def events_socket(self) -> Path:
        """Of the gRPC service that hears how the requests ended that were decided here."""
        return self.folder / f"events-{self.number}.sock"

    @property
    def lock_file(self) -> Path:
        """Held by the decider that has it."""
        return self.folder / f"decider-{self.number}.lock"


@dataclass(frozen=True, slots=True)
class GatewaySpec:
    """One front door. folder: private to it (mode 0700), with everything that it reads and writes;
    its path must leave room for a socket's name in 107 bytes. decided: paths about which the
    decider is asked, exact. own: paths of ours, exact; one that ends in / stands for one or two
    segments that follow. foreign: the servers are somebody else's, so Envoy itself tells the
    decider of first bytes and tails. from_header: of their answers, which says whom they are from;
    empty: none does. decider_away: what becomes of decided paths while none is there. ca: by
    which the certificates of servers with TLS are verified; without it they cannot be reached.
    deciders: how many there may be at a time."""

    folder: Path
    host: str
    port: int
    decided: tuple[str, ...]
    own: tuple[str, ...]
    tls: Tls | None = None
    foreign: bool = False
    from_header: str = ""
    decider_away: Literal["refuse", "least_request"] = "refuse"
    ca: Path | None = None
    bounds: Bounds = field(default_factory=Bounds)
    deciders: int = 1

    @property
    def scheme(self) -> str:
        """By which clients reach it."""
        return "http" if self.tls is None else "https"

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"{self.scheme}://{self.host}:{self.port}"

    @property
    def slots(self) -> tuple[DeciderSlot, ...]:
        """A place for each decider."""
        return tuple(DeciderSlot(self.folder, number) for number in range(self.deciders))

    @property
    def admin_socket(self) -> Path:
        """Of Envoy's administration interface, for this user alone."""
        return self.folder / "admin.sock"

    @property
    def bootstrap_file(self) -> Path:
        """Envoy's configuration."""
        return self.folder / "envoy.json"

    @property
    def certificate_file(self) -> Path:
        """Which certificate and key Envoy shows."""
        return self.folder / "certificate.json"

    @property
    def endpoints_file(self) -> Path:
        """Where `endpoints` writes and Envoy watches, in a folder of its own."""
        return self.folder / "endpoints" / "endpoints.json"

    @property
    def writer_lock_file(self) -> Path:
        """Held by the decider that writes `endpoints_file` for all."""
        return self.folder / "endpoints.lock"


@dataclass(frozen=True, slots=True)
class ServerEndpoint:
    """A server as Envoy reaches it. All servers are in one cluster, so that a request may go on to
    any other of its list, whatever its scheme, prefix or key.

    host: an IP address; names are resolved before (`endpoints.Resolver`). name: the host's name, in
    `host`, SNI and certificate; empty: `host`. draining: it gets no new request; begun answers go
    on. open: requests about which nobody could be asked may go there (`decider_away`). secret: of a
    worker of ours. prefix, key: of a foreign server, put before the client's path
    and sent in the place of its key. No other server sees them.
    """

    worker: str
    host: str
    port: int
    name: str = ""
    tls: bool = False
    draining: bool = False
    open: bool = True
    secret: str = ""
    prefix: str = ""
    key: str = ""

    @property
    def address(self) -> str:
        """By which the decider's list names it (`ENDPOINT_HEADER`)."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

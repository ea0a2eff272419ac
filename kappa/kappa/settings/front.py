"""Settings of `kappa route`: the servers behind it, and facts about each known beforehand."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, FilePath, field_validator, model_validator

from kappa.checks import http_parts
from kappa.protocol import DECIDED_PATHS, PASSED_PATHS
from kappa.settings.access import AccessSettings, HttpSettings, TenantSettings, open_door
from kappa.settings.base import Finite, Section, read_by, settings_from
from kappa.settings.pools import Name, ProfileName, ShapeName
from kappa.settings.routing import ObservingSettings, RouterSettings

_PRESENT = ("round-robin", "least-connections", "prefix-hash")
_EXAMPLE = "http://10.0.0.7:8000"


def _server_url(value: str) -> str:
    """A server's address without a trailing /v1; ValueError gives the reason."""
    parts = http_parts(value)
    if parts is None or parts.query or parts.fragment or parts.username:
        raise ValueError(f"{value!r} is no address of a server: give one such as {_EXAMPLE}")
    # Clients' base URLs end in /v1; the server's own root does not.
    return value.rstrip("/").removesuffix("/v1")


def _passed_path(value: str) -> None:
    """A path as clients send it; ValueError gives the reason."""
    if not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", value) or {".", ".."} & set(value.split("/")):
        raise ValueError(f"{value!r} is no path: give one such as /v1/files")


def _set_variable(value: str) -> None:
    """The name of an environment variable that holds a key; ValueError gives the reason."""
    if not os.environ.get(value):
        raise ValueError(f"the environment has no {value}: set it to the key that is wanted there")


KeyEnv = Annotated[str, read_by(_set_variable)]
ServerUrl = Annotated[str, AfterValidator(_server_url)]
PassedPath = Annotated[str, read_by(_passed_path)]


class BackendSettings(Section):
    """One OpenAI-compatible server. Figures of its own metrics come before these."""

    url: ServerUrl
    profile: ProfileName = Field(description="a node of the catalogue, or a profile in JSON")
    name: Name | None = Field(None, description="in metrics and tables; default: of its url")
    model: str | None = Field(
        None, description="the model that it must serve; default: whatever /v1/models lists"
    )
    shape: ShapeName | None = Field(
        None, description="built-in shape or config.json to price it by; default: by its model"
    )
    device_tokens: int | None = Field(
        None, ge=1, description="KV cache on its device, where its metrics tell nothing"
    )
    host_tokens: int = Field(0, ge=0, description="KV cache in its host tier; 0: it has none")
    events: tuple[str, ...] = Field(
        (),
        description="where it publishes KV events, tcp://HOST:PORT (vLLM: endpoint tcp://*:PORT); "
        "of several ranks the first one's, whose port plus the rank is each other's, or a list",
    )
    data_parallel_size: int = Field(
        1,
        ge=1,
        le=256,
        description="its data-parallel ranks behind one port (vLLM): each counts as a server, and "
        "is named to it by the header x-data-parallel-rank",
    )
    serves: tuple[PassedPath, ...] = Field(
        (), description="paths that it is for, as /v1/embeddings; default: all that go to servers"
    )
    key_env: KeyEnv | None = Field(
        None, description="environment variable with the key that it wants; none: the client's own"
    )

    @property
    def worker(self) -> str:
        """The backend's name, by default the host and port of its url."""
        return self.name or urlsplit(self.url).netloc

    @field_validator("events", mode="before")
    @classmethod
    def _may_be_one(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else () if value is None else value

    @field_validator("events")
    @classmethod
    def _are_sockets(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for endpoint in value:
            if not endpoint.startswith(("tcp://", "ipc://")):
                raise ValueError(f"{endpoint!r} is no ZMQ endpoint: give tcp://HOST:PORT")
        return value

    @model_validator(mode="after")
    def _of_every_rank(self) -> BackendSettings:
        size, given = self.data_parallel_size, self.events
        if size == 1 or not given or len(given) == size:
            return self
        port = given[0].rpartition(":")[2]
        if len(given) > 1 or not port.isdecimal() or int(port) + size > 1 << 16:
            raise ValueError(
                f"events: give one endpoint for each of the {size} ranks, or the first rank's, as "
                "tcp://HOST:PORT, whose port plus the rank is that of each other"
            )
        return self

    def ranks(self) -> list[tuple[BackendSettings, int | None]]:
        """Each data-parallel rank as a server of its own, and its number; itself and None if it has
        no more than one. Ranks have a # in their names, which no backend's has."""
        if self.data_parallel_size == 1:
            return [(self, None)]
        host, _, port = self.events[0].rpartition(":") if self.events else ("", "", "0")
        made: list[tuple[BackendSettings, int | None]] = []
        for rank in range(self.data_parallel_size):
            one = self.events[rank : rank + 1]
            if len(self.events) == 1:
                # As vLLM numbers them.
                one = (f"{host}:{int(port) + rank}",)
            name = f"{self.worker}#{rank}"
            made.append((self.model_copy(update={"name": name, "events": one}), rank))
        return made

    @property
    def key(self) -> str | None:
        """The server's key, from the environment; None if it needs none of ours."""
        return os.environ.get(self.key_env) if self.key_env else None


class ProbeSettings(Section):
    """Probes of backends for health and metrics, and when a backend counts as down."""

    every_s: Finite = Field(1.0, gt=0, le=60)
    timeout_s: Finite = Field(2.0, gt=0, le=60)
    failures: int = Field(3, ge=1, description="silent probes in a row after which it is down")
    connect_timeout_s: Finite = Field(2.0, gt=0, le=60)


class PeerSettings(Section):
    """Other `kappa route` before the same servers: each tells the others what it has in flight."""

    urls: tuple[ServerUrl, ...] = Field(
        (),
        description="where they listen; a host that resolves to several addresses (a headless "
        "Service) names a router at each. Oneself may be among them",
    )
    key_env: KeyEnv | None = Field(
        None, description="environment variable with an operator's key of theirs"
    )

    @property
    def key(self) -> str | None:
        """The key that they want, from the environment; None if they need none."""
        return os.environ.get(self.key_env) if self.key_env else None


class RoutingSettings(RouterSettings):
    """Routing in front of servers with queues of their own; bodies may hold images."""

    max_body_bytes: int = Field(64 << 20, ge=1024)
    max_queue: int = Field(4096, ge=1, description="requests in flight before 429")
    admission: bool = Field(
        False, description="refuse (429) requests predicted to miss their objective"
    )


class ListenSettings(HttpSettings):
    """The address of `kappa route`: one process, beside a server on the same machine."""

    port: int = Field(8080, ge=0, le=65535)
    replicas: Literal[1] = 1
    decider_away: Literal["refuse", "least_request"] = Field(
        "refuse",
        description="while the router is not there Envoy answers 503, or uses the least loaded "
        "server without looking at keys",
    )


class InferencePoolSettings(Section):
    """An InferencePool, from which the servers are taken instead of `backends`."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9.-]+/[a-z0-9.-]+$")] = Field(
        description="NAMESPACE/NAME"
    )
    profile_label: str = Field(
        "kappa-serve/profile",
        description="pods' label that names their profile; without it the node's "
        "nvidia.com/gpu.product does",
    )
    profiles: dict[str, ProfileName] = Field(
        default_factory=dict, description="profile by what the label says, besides the catalogue"
    )
    shape: ShapeName | None = Field(None, description="as of a backend, of all pods")
    host_tokens: int = Field(0, ge=0, description="as of a backend, of all pods")
    events_port: int | None = Field(
        None, ge=1, le=65535, description="where pods publish KV events; ranks at those that follow"
    )
    deletion_costs: bool = Field(
        False,
        description="annotate pods with the tokens that their caches spared the last requests, so "
        "that a ReplicaSet that shrinks removes the pod with the fewest; needs the right to patch",
    )


class PickerSettings(Section):
    """The endpoint picker of a gateway (Gateway API Inference Extension), instead of an Envoy of
    our own; `http` is then the address of our own paths."""

    port: int = Field(9002, ge=0, le=65535, description="of gRPC, at http.host; 0: any free one")
    pool: InferencePoolSettings | None = Field(
        None, description="none: the servers are those of backends"
    )


class FrontSettings(Section):
    """`kappa route`: servers, and how requests are routed among them."""

    backends: tuple[BackendSettings, ...] = ()
    probe: ProbeSettings = ProbeSettings()
    peers: PeerSettings = PeerSettings()
    first_byte_s: Finite = Field(
        60.0, gt=0, description="a streamed answer that has not begun by then is sought elsewhere"
    )
    present: str = Field(
        "round-robin",
        description="the present balancer, which steers in mode shadow and the rest in canary: "
        "emulated (round-robin, least-connections, prefix-hash), or the url of a real one",
    )
    present_header: str = Field(
        "x-backend", description="by which a real one's answers name their server, HOST:PORT"
    )
    journal: str | None = Field(
        None, description="file for decisions and their outcomes (`kappa route report`)"
    )
    journal_bytes: int = Field(256 << 20, ge=1 << 16, description="the journal ends at this size")
    router: RoutingSettings = RoutingSettings()
    tenants: TenantSettings = TenantSettings()
    access: AccessSettings = AccessSettings()
    http: ListenSettings = ListenSettings()
    observing: ObservingSettings = ObservingSettings()
    epp: PickerSettings | None = Field(
        None, description="pick servers for a gateway that passes the requests on itself"
    )
    block_tokens: int = Field(
        16, ge=1, le=4096, description="of servers that publish events: vLLM's --block-size"
    )
    passed: tuple[PassedPath, ...] = Field(
        (), description="paths of servers that clients may reach besides inference, as /v1/files"
    )
    ca: FilePath | None = Field(
        None,
        description="certificates (PEM) by which servers with https are verified; default: "
        "the system's",
    )
    drain_s: Finite = Field(30.0, ge=1, description="at the end: for requests that are open")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "WARNING"

    @field_validator("present")
    @classmethod
    def _is_a_balancer(cls, value: str) -> str:
        if value in _PRESENT:
            return value
        if "://" not in value:
            raise ValueError(f"{value!r}: give {', '.join(_PRESENT)}, or the url of your balancer")
        return _server_url(value)

    @model_validator(mode="after")
    def _known_paths(self) -> FrontSettings:
        known = {*DECIDED_PATHS, *PASSED_PATHS, *self.passed}
        for one in self.backends:
            strange = sorted(set(one.serves) - known)
            if strange:
                raise ValueError(
                    f"backend {one.worker} serves {strange[0]}, which clients cannot reach: name "
                    f"it in passed, or one of {', '.join(sorted(known))}"
                )
        return self

    @model_validator(mode="after")
    def _unlike(self) -> FrontSettings:
        pool = self.epp.pool if self.epp is not None else None
        if bool(self.backends) == (pool is not None):
            raise ValueError("backends: give at least one server, and none beside epp.pool")
        for what in ("url", "worker"):
            seen = [getattr(one, what) for one in self.backends]
            twice = sorted({one for one in seen if seen.count(one) > 1})
            if twice:
                where = "url" if what == "url" else "name"
                raise ValueError(f"two backends have the {where} {twice[0]}: drop or change one")
        if self.router.mode != "on" and self.journal is None:
            raise ValueError(
                f"router.mode {self.router.mode}: name a journal (--journal FILE), from which "
                "kappa route report says what ours would save"
            )
        fault = open_door(self.tenants, self.access, self.http)
        if fault is not None:
            raise ValueError(f"http.host {fault}")
        if self.http.decider_away != "refuse" and self.tenants.closed:
            raise ValueError(
                f"http.decider_away: {self.http.decider_away} serves anybody while the router is "
                "not there, and tenants.unknown: refuse nobody without a key: give "
                "http.decider_away: refuse"
            )
        if self.peers.urls and self.tenants.closed and self.peers.key_env is None:
            raise ValueError(
                "peers: tenants.unknown: refuse has routers ask each other with an operator's key: "
                "give peers.key_env"
            )
        if self.epp is not None:
            self._fit_a_gateway()
        return self

    def _fit_a_gateway(self) -> None:
        """Raises ValueError for what only an Envoy of our own does."""
        for one in self.backends:
            parts = urlsplit(one.url)
            if parts.scheme != "http" or parts.path or one.key_env:
                raise ValueError(
                    f"backends: {one.url} has TLS, a path or a key; before it stands the gateway "
                    "(epp): give http://HOST:PORT, and configure the rest there"
                )
            if one.data_parallel_size > 1:
                raise ValueError(
                    f"backends: a gateway (epp) cannot name a rank of {one.url}: give each rank a "
                    "port (vLLM: --data-parallel-external-lb) and list it as a server"
                )
        if "://" in self.present or self.http.decider_away != "refuse":
            raise ValueError(
                "epp: requests pass the gateway alone: name no balancer as present, and leave "
                "http.decider_away as it is (the pool's failureMode says it)"
            )


def backend_of(text: str) -> dict[str, str]:
    """A `--backend URL=PROFILE` as a mapping; ValueError names the missing part."""
    url, given, profile = text.rpartition("=")
    if not given or not profile or not url:
        raise ValueError(f"--backend {text!r}: give URL=PROFILE, such as {_EXAMPLE}=h100-pcie5")
    return {"url": url, "profile": profile}


def load_front_settings(path: str | Path | None = None, **overrides: Any) -> FrontSettings:
    """Read a file of `kappa route` (`settings_from`)."""
    return settings_from(FrontSettings, path, **overrides)

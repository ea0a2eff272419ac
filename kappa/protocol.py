"""What a worker tells the cluster: who it is (once), and what it measured (all the time).

An `Announcement` travels with Ray Serve's routing statistics, a `WorkerReport` on the worker's own
stream beside the KV events. Both are plain data that turn into dictionaries, so that workers and
routers share the words and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import Any, NamedTuple, TypeVar

from kappa.cost import StepModel
from kappa.hardware import NodeProfile

PROTOCOL = 1

# Kinds of message on a worker's stream: the engine's own event batch, a `WorkerReport`, and
# "forget all blocks".
KV, REPORT, RESET = b"kv", b"report", b"reset"

# A step of fewer tokens is too short to tell of a FLOP rate.
COMPUTE_STEP_TOKENS = 512

# How an error begins in a streamed answer of Ray Serve LLM's, which may hold several events.
ERROR_EVENT = 'data: {"error"'

# Under these keys the ingress' words to the engine travel in vLLM's `SamplingParams.extra_args`:
# its request id; the tenant and its weight; how many tokens the prompt has, and how many of them it
# expects to find on the device and in the host tier; JSON of what other workers charged ({tenant:
# [vram_s, gpu_s, link_s]}, cumulative).
REQUEST_ID_KEY = "kappa_request_id"

TENANT_KEY = "kappa_tenant"

WEIGHT_KEY = "kappa_weight"

PROMPT_TOKENS_KEY = "kappa_prompt_tokens"

DEVICE_TOKENS_KEY = "kappa_device_tokens"

HOST_TOKENS_KEY = "kappa_host_tokens"

CHARGES_KEY = "kappa_charges"

# Seconds that the router predicts the request to take of the worker's link and gpu.
LINK_S_KEY = "kappa_link_s"

GPU_S_KEY = "kappa_gpu_s"

# For engines that do not tokenize: the prompt as the ingress did (base64 of little-endian int32),
# and how its cached prefix is to come back, if the client asked.
PROMPT_KEY = "kappa_prompt"

PLAN_KEY = "kappa_plan"

# Set where the answer may be approximate.
APPROX_KEY = "kappa_approx"

PROMPT_ENGINES = ("torch", "emulated")

# Charges are kept of so many tenants, here and in whatever adds them up.
MAX_TENANTS = 1024


class EngineDiedError(RuntimeError):
    """A worker's engine is dead, and so soon will be the worker: try another."""


def _known(cls: type, data: Mapping[str, Any], what: str) -> dict[str, Any]:
    names = {f.name for f in fields(cls)}
    unknown = sorted(set(data) - names)
    if unknown:
        raise ValueError(f"{what}: unknown keys {unknown}; this side speaks protocol {PROTOCOL}")
    missing = [
        f.name
        for f in fields(cls)
        if f.name not in data and f.default is MISSING and f.default_factory is MISSING
    ]
    if missing:
        raise ValueError(f"{what}: lacks {missing}; this side speaks protocol {PROTOCOL}")
    return dict(data)


@dataclass(frozen=True, slots=True)
class Announcement:
    """A worker's identity, hardware and limits; constant for the life of the worker.

    worker: the replica's unique id. node: its profile (measured, catalogue or paced). step: the
    constants of an engine step. kv_bytes_per_token: M of the model it serves, or emulates.
    load_s = load_fixed_s + tokens * kv_bytes_per_token / node.h2d_bytes_per_s. fingerprint: hash of
    everything two workers must share for their KV blocks to mean the same. net_bytes_per_s: how
    fast it can fetch blocks from a peer's host tier; 0 when it cannot. packs: its scheduler goes on
    past a request that does not fit, and starts loads just in time. engine: its kind. load_plan:
    how it brings cached prefixes back, {"planner": name, "cpu_room_share": as in the settings,
    where its CPU attends to host memory, "act_share": share of stored blocks kept
    as activations, "rates": as `kappa.plans.rates` reads them}; empty if it loads them whole and
    then computes. tier: the kind of its host tier; shared_tier: names the server that several
    workers have as their host tier, empty if it is the worker's own. start_s: from the start of its
    process until it could serve; 0: not known. max_sequences: requests that it runs at a time; 0:
    not known.

    pool: the cluster file's pool that it belongs to. role: `both`, `prefill` (hands its KV over) or
    `decode` (takes it over).
    """

    worker: str
    model: str
    node: NodeProfile
    step: StepModel
    kv_bytes_per_token: float
    emulated_model: str
    fingerprint: str
    block_tokens: int
    device_blocks: int
    host_blocks: int
    max_batch_tokens: int
    max_context_tokens: int
    events_endpoint: str
    snapshot_endpoint: str
    profile_error: str = ""
    net_bytes_per_s: float = 0.0
    packs: bool = False
    engine: str = "vllm"
    load_plan: Mapping[str, Any] = field(default_factory=dict)
    tier: str = "own"
    shared_tier: str = ""
    start_s: float = 0.0
    measured: Mapping[str, Any] = field(default_factory=dict)
    pool: str = ""
    role: str = "both"
    max_sequences: int = 0
    protocol: int = PROTOCOL

    @property
    def kappa_crit(self) -> float:
        """κ_crit: seconds to compute a new token over seconds to load a cached one."""
        return self.step.token_s * self.node.h2d_bytes_per_s / self.kv_bytes_per_token

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready copy."""
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        return {
            **data,
            "node": self.node.to_dict(),
            "step": self.step.to_dict(),
            "measured": dict(self.measured),
            "load_plan": dict(self.load_plan),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Announcement:
        """Rebuild from `to_dict`; ValueError names a wrong or missing key, or another protocol."""
        if data.get("protocol", PROTOCOL) != PROTOCOL:
            raise ValueError(
                f"worker {data.get('worker')} speaks protocol {data.get('protocol')}, "
                f"this router {PROTOCOL}: run one version of kappa-serve"
            )
        known = _known(cls, data, "announcement")
        known["node"] = NodeProfile.from_dict(known["node"])
        known["step"] = StepModel.from_dict(known["step"])
        return cls(**known)


@dataclass(frozen=True, slots=True)
class Admission:
    """The engine admitted a request: its prompt's tokens by source, for good."""

    request_id: str
    device_tokens: int
    host_tokens: int
    new_tokens: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request is at the worker, whichever ingress sent it, with what that ingress expected.

    Tokens of the prompt by source, as expected; all zero where the ingress knew nothing of it.
    max_tokens: the client's bound on generated tokens, 0 if it gave none. prefilled: its prompt is
    done.
    """

    request_id: str
    device_tokens: int = 0
    host_tokens: int = 0
    new_tokens: int = 0
    max_tokens: int = 0
    prefilled: bool = False

    def __post_init__(self) -> None:
        for name in ("device_tokens", "host_tokens", "new_tokens", "max_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise ValueError(
                    f"arrival: {name} of {self.request_id!r} is {value!r}; give a count, 0 or more"
                )


@dataclass(frozen=True, slots=True)
class Spent:
    """What a request had taken when its prompt was computed, in real seconds.

    load_s: of the link, by its own load; compute_s: of the steps that computed its prompt, which
    may have served others too.
    """

    request_id: str
    load_s: float
    compute_s: float


_Row = TypeVar("_Row", Admission, Arrival, Spent)


class Charge(NamedTuple):
    """What was used of one worker, in seconds of the whole resource.

    vram_s: share of all blocks held, times seconds; gpu_s: share of an iteration's tokens, times
    its seconds; link_s: seconds of loading.
    """

    vram_s: float = 0.0
    gpu_s: float = 0.0
    link_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TenantCharge:
    """What one tenant used of the reporting worker since that started; see `Charge`."""

    tenant: str
    vram_s: float
    gpu_s: float
    link_s: float

    def __post_init__(self) -> None:
        if not isinstance(self.tenant, str):
            raise ValueError(f"charge: tenant is {self.tenant!r}; give its name")
        for name in Charge._fields:
            value = getattr(self, name)
            if not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
                raise ValueError(
                    f"charge: {name} of {self.tenant!r} is {value!r}; give seconds, at least 0"
                )

    @property
    def charge(self) -> Charge:
        """Its seconds alone."""
        return Charge(self.vram_s, self.gpu_s, self.link_s)


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What a worker measured since its last report, and its totals since it started.

    Seconds are real (dilated on a paced node). `*_total` never fall within one worker's life;
    `admitted`, `prefilled` and `spent` list requests of this report only. `computed_*`: what steps
    of at least `COMPUTE_STEP_TOKENS` tokens spent computing, as far as their length tells
    (`kappa.cost.StepParts.computed_s`), and what the announced step model says of the same steps.
    host_spare_blocks: of the host tier, unused or held only as copies of what a peer has.

    Of the engine's scheduler: `iterations_total` counts iterations, `queued_iterations_total` those
    with a non-empty queue; over the latter `budget_fill_sum` and `vram_fill_sum` add up the share
    of the token budget and of the blocks in use. `tier_failures_total`: what an LMCache server
    failed to do, by what. `passed_total`: how often a waiting request was
    looked at and left, by reason. `waiting`, `loading`, `running`: requests, in the last iteration.
    `power_w`, `power_cap_w`: what its GPUs draw and may draw; `energy_j_total`: since it started;
    `power_source`: `nvml`, `model`, `paced` (modelled, in emulated time), or empty: not known.
    `charges`: cumulative, at least of the tenants whose charge changed since the last report.
    `arrived`, `finished`: requests that came to the replica, or left it, since the last report;
    `in_flight`: all that are there, told now and then and after every snapshot, else None.
    """

    worker: str
    time_s: float
    steps_total: int = 0
    step_seconds_total: float = 0.0
    computed_seconds_total: float = 0.0
    computed_announced_seconds_total: float = 0.0
    step_tokens_total: int = 0
    overruns_total: int = 0
    load_tokens_total: int = 0
    load_bytes_total: int = 0
    load_seconds_total: float = 0.0
    store_tokens_total: int = 0
    store_bytes_total: int = 0
    store_seconds_total: float = 0.0
    store_wait_seconds_total: float = 0.0
    h2d_bytes_per_s: float = 0.0
    event_gaps_total: int = 0
    host_spare_blocks: int = 0
    iterations_total: int = 0
    queued_iterations_total: int = 0
    budget_fill_sum: float = 0.0
    vram_fill_sum: float = 0.0
    passed_total: Mapping[str, int] = field(default_factory=dict)
    tier_failures_total: Mapping[str, int] = field(default_factory=dict)
    rule_errors_total: int = 0
    preemptions_total: int = 0
    stores_dropped_total: int = 0
    failed_loads_total: int = 0
    misused_blocks_total: int = 0
    power_w: float = 0.0
    power_cap_w: float = 0.0
    energy_j_total: float = 0.0
    power_source: str = ""
    waiting: int = 0
    loading: int = 0
    running: int = 0
    admitted: tuple[Admission, ...] = ()
    prefilled: tuple[str, ...] = ()
    spent: tuple[Spent, ...] = ()
    charges: tuple[TenantCharge, ...] = ()
    arrived: tuple[Arrival, ...] = ()
    finished: tuple[str, ...] = ()
    in_flight: tuple[Arrival, ...] | None = None

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready copy."""
        return asdict(self)

    def renamed(self, name: Callable[[str], str]) -> WorkerReport:
        """The same report with each request's id as `name` gives it."""

        def ids(rows: Iterable[_Row]) -> tuple[_Row, ...]:
            return tuple(replace(row, request_id=name(row.request_id)) for row in rows)

        return replace(
            self,
            admitted=ids(self.admitted),
            prefilled=tuple(map(name, self.prefilled)),
            spent=ids(self.spent),
            arrived=ids(self.arrived),
            finished=tuple(map(name, self.finished)),
            in_flight=None if self.in_flight is None else ids(self.in_flight),
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> WorkerReport:
        """Rebuild from `to_dict`; ValueError names an unknown or missing key."""
        known = _known(cls, data, "report")
        known["admitted"] = tuple(
            Admission(**_known(Admission, a, "admission")) for a in known.get("admitted", ())
        )
        known["prefilled"] = tuple(known.get("prefilled", ()))
        known["spent"] = tuple(Spent(**_known(Spent, s, "spent")) for s in known.get("spent", ()))
        for name in ("passed_total", "tier_failures_total"):
            known[name] = dict(known.get(name, {}))
        known["charges"] = tuple(
            TenantCharge(**_known(TenantCharge, c, "charge")) for c in known.get("charges", ())
        )
        known["arrived"] = _arrivals(known.get("arrived", ()))
        known["finished"] = tuple(known.get("finished", ()))
        in_flight = known.get("in_flight")
        known["in_flight"] = None if in_flight is None else _arrivals(in_flight)
        return cls(**known)


def _arrivals(rows: Iterable[Mapping[str, Any]]) -> tuple[Arrival, ...]:
    return tuple(Arrival(**_known(Arrival, row, "arrival")) for row in rows)

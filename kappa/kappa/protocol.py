"""What a worker reports to the cluster: who it is (once), and what it measured (all the time).

An `Announcement` travels with Ray Serve's routing statistics, a `WorkerReport` on the worker's own
stream beside the KV events. Both become plain data, so that workers and routers share these records
and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from kappa.checks import record_from
from kappa.cost import StepModel, StepWork, critical_ratio
from kappa.hardware import NodeProfile

PROTOCOL = 1

# Kinds of message on a worker's stream: the engine's own event batch, a `WorkerReport`, and
# "forget all blocks".
KV, REPORT, RESET = b"kv", b"report", b"reset"

# Of steps, and of loads, that a report holds.
SAMPLES = 16

# Under these keys of Ray Serve's routing statistics a replica announces itself (an `Announcement`),
# and of a plain Ray Serve LLM app how many requests its engine has: some fields of `WorkerReport`.
ANNOUNCEMENT_KEY, LOAD_KEY = "kappa", "kappa_load"

# How an event of a stream begins that tells an error.
ERROR_EVENT = 'data: {"error"'

# Under these keys the decider's request metadata travels in vLLM's `SamplingParams.extra_args`:
# its request id; the tenant and its weight; how many tokens the prompt has, and how many of them it
# expects to find on the device, in the tiers behind it, and of these on disk alone; JSON of what
# other workers charged ({tenant: [vram_s, gpu_s, link_s]}, cumulative).
REQUEST_ID_KEY = "kappa_request_id"
TENANT_KEY = "kappa_tenant"
WEIGHT_KEY = "kappa_weight"
PROMPT_TOKENS_KEY = "kappa_prompt_tokens"
DEVICE_TOKENS_KEY = "kappa_device_tokens"
HOST_TOKENS_KEY = "kappa_host_tokens"
DISK_TOKENS_KEY = "kappa_disk_tokens"
CHARGES_KEY = "kappa_charges"
# Seconds that the router predicts the request to take of the worker's link and gpu.
LINK_S_KEY = "kappa_link_s"
GPU_S_KEY = "kappa_gpu_s"
# For engines of our own: how the prompt's cached prefix is to come back, if the client asked.
PLAN_KEY = "kappa_plan"
# Set where the answer may be approximate.
APPROX_KEY = "kappa_approx"
# By which a client asks for that, and is told of it.
APPROX_HEADER = "x-kappa-approx"
# On each answer of a worker whose engine only emulates one.
ENGINE_HEADER = "x-kappa-engine"
# In `kv_transfer_params`: the peer whose host tier holds what the worker lacks, and what that is.
PEER_PARAM = "kappa_peer"
OWN_ENGINES = ("torch", "emulated")

# Headers between the front door's Envoy, its decider and the workers; a client's own of these names
# are removed before anything else. In the decider's answer to Envoy: servers in the order in which
# they are tried, `HOST:PORT,HOST:PORT`, which no server sees.
ENDPOINT_HEADER = "x-gateway-destination-endpoint"
# From the decider to a worker: the request's id in the decider, and fields that the worker puts
# into the body (JSON). By the server, on each attempt: the cluster's secret.
TO_ID_HEADER = "x-kappa-to-id"
TO_BODY_HEADER = "x-kappa-to-body"
# Names of top-level fields that the body loses, with commas between.
TO_DROP_HEADER = "x-kappa-to-drop"
TO_SECRET_HEADER = "x-kappa-to-secret"
# Headers that the worker puts on its answer (JSON): a client is told of the one that served it.
TO_SHOW_HEADER = "x-kappa-to-show"
# In a worker's 429 or 5xx: no byte of an answer was sent, and the request may be tried at another;
# or its engine died, and what the request had to do with it its decider must judge before.
RETRY_HEADER = "x-kappa-retry"
RETRY_ELSEWHERE, RETRY_DIED = "elsewhere", "died"
# Of a worker's port, for its decider: measure the machine again; end what an engine that hangs has.
PROFILE_PATH, GIVE_UP_PATH = "/kappa/profile", "/kappa/give-up"

# Charges are kept of so many tenants, here and in whatever adds them up.
MAX_TENANTS = 1024
# Of the classes of priority, 0 first.
MOST_PRIORITY = 9

_SPEAKS = f"this side speaks protocol {PROTOCOL}"

Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e300)]


class EngineDiedError(RuntimeError):
    """A worker's engine is dead, and so soon will be the worker: try another."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """A worker's identity, hardware and limits; constant for the life of the worker.

    worker: the replica's unique id. node: its profile (measured, catalogue or paced). step: the
    constants of an engine step. kv_bytes_per_token: M of the model it serves, or emulates.
    load_s = load_fixed_s + tokens * kv_bytes_per_token / node.h2d_bytes_per_s, and as much again at
    node.disk_bytes_per_s for those of them on disk. disk_blocks: of its disk tier, else 0.
    fingerprint: hash of everything two workers must share for their KV blocks to mean the same.
    net_bytes_per_s: how fast it can fetch blocks from another worker's host tier, until it did; 0
    when it cannot. peer: where its own host tier can be read, host:port/token; empty: nowhere.
    packs: its scheduler goes on past a request that does not fit, and starts loads just in time.
    step_factor: what bounds its steps besides the token budget (`kappa.cost.StepLimit`).
    engine: its kind.
    load_plan: how it brings cached prefixes back, {"planner": name, "cpu_room_share": as in the
    settings, where its CPU attends to host memory, "act_share": share of stored blocks kept as
    activations, "rates": as `kappa.plans.rates` reads them, of vLLM with the overlap of a request
    that is alone}; empty if it loads them whole and then computes. tier: the kind of its host tier;
    shared_tier: names the server that several workers have as their host tier, empty if it is the
    worker's own. start_s: from the start of its process until it could serve; 0: not known.
    max_sequences: requests that it runs at a time; 0: not known. pool: the cluster file's pool that
    it belongs to. role: `both`, `prefill` (hands its KV over) or `decode` (takes it over).
    measured: what the machine and the engine were measured to do (`engine.profile`,
    `kappa_workers.vllm.measured_engine`), with `at_s`, when; node and step have the figures that
    are priced, and profile_error names what fits badly or is missing. graphs: CUDA graphs that it
    runs by, vLLM's `cudagraph_mode`; empty: not known.
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
    peer: str = ""
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
    disk_blocks: int = 0
    graphs: str = ""
    step_factor: float = 0.0
    http: str = ""
    """Its own HTTP port, HOST:PORT, for fronts that know the cluster's secret; empty: none."""
    protocol: int = PROTOCOL

    @property
    def kappa_crit(self) -> float:
        """κ_crit of the worker, for the model that it serves or emulates."""
        return critical_ratio(self.step.token_s, self.node.h2d_bytes_per_s, self.kv_bytes_per_token)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Announcement:
        """Rebuild from `to_dict`; ValueError names a wrong or missing key, or another protocol."""
        if data.get("protocol", PROTOCOL) != PROTOCOL:
            raise ValueError(
                f"worker {data.get('worker')} speaks protocol {data.get('protocol')}, "
                f"this router {PROTOCOL}: run one version of kappa-serve"
            )
        nested = dict(data)
        for name, kind in (("node", NodeProfile), ("step", StepModel)):
            if name in nested:
                nested[name] = kind.from_dict(nested[name])
        return record_from(cls, nested, "announcement", _SPEAKS)


class _ReportRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A record within a report."""


class Admission(_ReportRow, frozen=True):
    """The engine admitted a request: its prompt's tokens by source, for good.

    disk_tokens: of `host_tokens`, those that came from disk.
    """

    request_id: str
    device_tokens: int
    host_tokens: int
    new_tokens: int
    disk_tokens: int = 0


class Arrival(_ReportRow, frozen=True):
    """A request is at the worker, whichever decider sent it, with what that decider expected.

    Tokens of the prompt by source, as expected; all zero where the decider knew nothing of it.
    disk_tokens: of `host_tokens`. max_tokens: the client's bound on generated tokens, 0 if it gave
    none. prefilled: its prompt is done.
    """

    request_id: str
    device_tokens: Count = 0
    host_tokens: Count = 0
    new_tokens: Count = 0
    max_tokens: Count = 0
    prefilled: bool = False
    disk_tokens: Count = 0


class Spent(_ReportRow, frozen=True):
    """What a request had taken when its prompt was computed, in real seconds.

    load_s: of the link, by its own load; compute_s: of the steps that computed its prompt, which
    may have served others too.
    """

    request_id: str
    load_s: float
    compute_s: float


class StepSample(_ReportRow, frozen=True):
    """A step that the engine ran: its work (`kappa.cost.StepWork`), and real seconds."""

    tokens: float
    pairs: float
    reads: float
    seconds: float


class LoadSample(_ReportRow, frozen=True, omit_defaults=True):
    """Tokens that were loaded at once, and real seconds of the link; disk_tokens: of these, those
    that came from disk."""

    tokens: float
    seconds: float
    disk_tokens: float = 0.0


def _size(tokens: float) -> int:
    return min(int(tokens).bit_length(), SAMPLES - 1)


class Samples:
    """Of the steps and loads since the last report the latest of each size (a power of two), so
    that the many that decode leave room for the few that prefill; `SAMPLES` of each at most."""

    def __init__(self) -> None:
        self._steps: dict[int, StepSample] = {}
        self._loads: dict[tuple[bool, int], LoadSample] = {}

    def add_step(self, work: StepWork[float], seconds: float) -> None:
        """A step of that work lasted so long."""
        self._steps[_size(work.tokens)] = StepSample(*work, seconds)

    def add_load(self, tokens: float, seconds: float, disk_tokens: float = 0.0) -> None:
        """So many tokens, some of them from disk, took so long of the link."""
        sample = LoadSample(tokens, seconds, disk_tokens)
        self._loads[disk_tokens > 0, _size(tokens)] = sample

    def take(self) -> tuple[tuple[StepSample, ...], tuple[LoadSample, ...]]:
        """What was kept; it starts anew."""
        taken = tuple(self._steps.values()), tuple(self._loads.values())
        self._steps, self._loads = {}, {}
        return taken


_Request = TypeVar("_Request", Admission, Arrival, Spent)


class Charge(NamedTuple):
    """What was used of one worker, in seconds of the whole resource.

    vram_s: share of all blocks held, times seconds; gpu_s: share of an iteration's tokens, times
    its seconds; link_s: seconds of loading.
    """

    vram_s: float = 0.0
    gpu_s: float = 0.0
    link_s: float = 0.0


class TenantCharge(_ReportRow, frozen=True):
    """What one tenant used of the reporting worker since that started; see `Charge`."""

    tenant: str
    vram_s: Seconds
    gpu_s: Seconds
    link_s: Seconds

    @property
    def charge(self) -> Charge:
        return Charge(self.vram_s, self.gpu_s, self.link_s)


class WorkerReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a worker measured since its last report, and its totals since it started.

    Seconds are real (dilated on a paced node). `*_total` never fall within one worker's life;
    `admitted`, `prefilled` and `spent` list requests of this report only; `steps` and `loads` some
    of those that it adds to the totals, unlike each other (`Samples`).
    host_spare_blocks: of the host tier, unused or held only as copies of what another worker has.
    `fetch_*_total`: what it took from others' host tiers; net_tokens_per_s: an EWMA of how fast, 0:
    not known.

    Of the engine's scheduler: `iterations_total` counts iterations, `queued_iterations_total` those
    with a non-empty queue; over the latter `budget_fill_sum` and `vram_fill_sum` add up the share
    of the token budget and of the blocks in use. `tier_failures_total`: what an LMCache server
    or a peer failed to do, by what. `passed_total`: how often a waiting request was
    looked at and left, by reason. `waiting`, `loading`, `running`: requests, in the last iteration.
    `power_w`, `power_cap_w`: what its GPUs draw and may draw; `energy_j_total`: since it started;
    `power_source`: `nvml`, `model`, `paced` (modelled, in emulated time), or empty: not known.
    `charges`: cumulative, at least of the tenants whose charge changed since the last report.
    `arrived`, `finished`: requests that came to the replica, or left it, since the last report;
    `generated`: of those that left, the tokens of their answers, by request, unless there were
    none; `failed`: of those that left, those whose engine failed while it answered; `in_flight`:
    all that are there, now and then and after every snapshot, else None.
    """

    worker: str
    time_s: float
    steps_total: int = 0
    step_seconds_total: float = 0.0
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
    fetch_tokens_total: int = 0
    fetch_bytes_total: int = 0
    fetch_seconds_total: float = 0.0
    net_tokens_per_s: float = 0.0
    event_gaps_total: int = 0
    host_spare_blocks: int = 0
    iterations_total: int = 0
    queued_iterations_total: int = 0
    budget_fill_sum: float = 0.0
    vram_fill_sum: float = 0.0
    passed_total: Mapping[str, int] = {}
    tier_failures_total: Mapping[str, int] = {}
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
    steps: tuple[StepSample, ...] = ()
    loads: tuple[LoadSample, ...] = ()
    charges: tuple[TenantCharge, ...] = ()
    arrived: tuple[Arrival, ...] = ()
    finished: tuple[str, ...] = ()
    generated: Mapping[str, Count] = {}
    failed: tuple[str, ...] = ()
    in_flight: tuple[Arrival, ...] | None = None

    def to_dict(self) -> dict[str, Any]:
        data: dict[str, Any] = msgspec.to_builtins(self)
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> WorkerReport:
        """Rebuild from `to_dict`; ValueError names an unknown, missing or unusable field."""
        try:
            return msgspec.convert(data, cls)
        except msgspec.ValidationError as error:
            raise ValueError(f"report: {error}; {_SPEAKS}") from None

    def renamed(self, name: Callable[[str], str]) -> WorkerReport:
        """The same report with each request's id as `name` gives it."""

        def ids(rows: Iterable[_Request]) -> tuple[_Request, ...]:
            return tuple(replace(row, request_id=name(row.request_id)) for row in rows)

        return replace(
            self,
            admitted=ids(self.admitted),
            prefilled=tuple(map(name, self.prefilled)),
            spent=ids(self.spent),
            arrived=ids(self.arrived),
            finished=tuple(map(name, self.finished)),
            generated={name(one): tokens for one, tokens in self.generated.items()},
            failed=tuple(map(name, self.failed)),
            in_flight=None if self.in_flight is None else ids(self.in_flight),
        )

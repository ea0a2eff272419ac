"""Records that workers send to routers: their announcement (once) and their reports (always).

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
from kappa.cost import StepModel, StepWork
from kappa.hardware import NodeProfile

PROTOCOL = 1

# Kinds of message on a worker's stream: the engine's own event batch, a `WorkerReport`, and
# "forget all blocks".
KV, REPORT, RESET = b"kv", b"report", b"reset"

# The most step samples, and the most load samples, in a report.
SAMPLES = 16

# Under these keys of Ray Serve's routing statistics a replica announces itself (an `Announcement`),
# and of a plain Ray Serve LLM app how many requests its engine has: some fields of `WorkerReport`.
ANNOUNCEMENT_KEY, LOAD_KEY = "kappa", "kappa_load"

# The beginning of a stream's event that carries an error.
ERROR_EVENT = 'data: {"error"'

# Under these keys the decider's request metadata travels in vLLM's `SamplingParams.extra_args`:
# its request id; the tenant and its weight; the prompt's tokens, and how many of them it expects on
# the device, in the tiers behind it, and of the latter on disk alone; JSON of other workers'
# charges ({tenant: [vram_s, gpu_s, link_s]}, cumulative).
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
# A client asks for that by this header, and an approximate answer carries it.
APPROX_HEADER = "x-kappa-approx"
# On each answer of an emulated engine.
ENGINE_HEADER = "x-kappa-engine"
# In `kv_transfer_params`: the peer that holds missing blocks in its host tier, and which blocks.
PEER_PARAM = "kappa_peer"
OWN_ENGINES = ("torch", "emulated")

# Headers between the front door's Envoy, its decider and the workers; a client's own of these names
# are removed before anything else. In the decider's answer to Envoy: servers in the order in which
# they are tried, `HOST:PORT,HOST:PORT`, which no server sees.
ENDPOINT_HEADER = "x-gateway-destination-endpoint"
# From the decider to a worker: the request's id in the decider, and fields that the worker puts
# into the body (JSON).
TO_ID_HEADER = "x-kappa-to-id"
TO_BODY_HEADER = "x-kappa-to-body"
# Names of top-level fields that the body loses, with commas between.
TO_DROP_HEADER = "x-kappa-to-drop"
# The cluster's secret, set by the server on each attempt.
TO_SECRET_HEADER = "x-kappa-to-secret"
# The data-parallel rank of a foreign server that a request is for; `NO_RANK`: the server chooses.
TO_RANK_HEADER, NO_RANK = "x-kappa-to-rank", "none"
# Headers that the worker puts on its answer (JSON), as for the node that served it.
TO_SHOW_HEADER = "x-kappa-to-show"
# In a worker's 429 or 5xx: no byte of an answer was sent, and the request may be tried elsewhere;
# or its engine died, and the decider must first judge whether the request caused that.
RETRY_HEADER = "x-kappa-retry"
RETRY_ELSEWHERE, RETRY_DIED = "elsewhere", "died"
# Paths of a worker's port, for its decider: measure the machine again; end all requests of an
# engine that hangs.
PROFILE_PATH, GIVE_UP_PATH = "/kappa/profile", "/kappa/give-up"

DECIDED_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
"""What engines do for clients by price: a decider says which."""
PASSED_PATHS = (
    "/v1/messages/count_tokens", "/v1/embeddings", "/v1/rerank", "/rerank", "/v2/rerank",
    "/v1/score", "/score", "/pooling", "/classify", "/tokenize", "/detokenize",
    "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/speech",
)  # fmt: skip
"""Inference that is not priced, and may be done twice."""

# The most tenants with charges of their own, in a worker and in sums over workers.
MAX_TENANTS = 1024
# The last class of priority; 0 goes first.
MOST_PRIORITY = 9

_SPEAKS = f"this side speaks protocol {PROTOCOL}"

Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e300)]


class EngineDiedError(RuntimeError):
    """A worker's engine died, and the worker is about to: try another one."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """A worker's identity, hardware and limits; constant for the life of the worker.

    load_s = load_fixed_s + tokens * kv_bytes_per_token / node.h2d_bytes_per_s, and as much again at
    node.disk_bytes_per_s for tokens on disk.
    """

    worker: str  # the replica's unique id
    model: str
    node: NodeProfile  # measured, of the catalogue, or paced
    step: StepModel  # constants of an engine step
    kv_bytes_per_token: float  # of the model that it serves, or emulates
    emulated_model: str
    # Hash of everything that two workers must share for their KV blocks to mean the same.
    fingerprint: str
    block_tokens: int
    device_blocks: int
    host_blocks: int
    max_batch_tokens: int
    max_context_tokens: int
    events_endpoint: str
    snapshot_endpoint: str
    # Measured figures that fit badly or are missing.
    profile_error: str = ""
    # Prior speed of fetching blocks from another worker's host tier; 0: it cannot fetch.
    net_bytes_per_s: float = 0.0
    # Where its own host tier can be read, host:port/token; empty: nowhere.
    peer: str = ""
    # Its scheduler goes on past a request that does not fit, and starts loads just in time.
    packs: bool = False
    engine: str = "vllm"  # kind
    # How cached prefixes come back; empty: loaded whole, then computed. {"planner": name,
    # "cpu_room_share": as in the settings, where its CPU attends to host memory, "act_share": share
    # of stored blocks kept as activations, "rates": as `kappa.plans.rates` reads them, of vLLM with
    # the overlap of a request that is alone}.
    load_plan: Mapping[str, Any] = field(default_factory=dict)
    tier: str = "own"  # kind of host tier
    # The server that several workers use as their host tier; empty: the tier is its own.
    shared_tier: str = ""
    start_s: float = 0.0  # from its process' start until it could serve; 0: not known
    # What machine and engine were measured to do (`kappa_engine.profile`,
    # `kappa_workers.vllm.measured_engine`), with the time `at_s`; node and step have the figures
    # that are priced.
    measured: Mapping[str, Any] = field(default_factory=dict)
    pool: str = ""  # of the cluster file
    role: str = "both"  # or "prefill" (hands its KV over), "decode" (takes it over)
    max_sequences: int = 0  # requests that it runs at a time; 0: not known
    disk_blocks: int = 0  # of its disk tier; 0: none
    graphs: str = ""  # vLLM's `cudagraph_mode`; empty: not known
    # Bounds its steps besides the token budget (`kappa.cost.StepLimit`).
    step_factor: float = 0.0
    # Its own HTTP port, HOST:PORT, for fronts that know the cluster's secret; empty: none.
    http: str = ""
    protocol: int = PROTOCOL

    @property
    def kappa_literal(self) -> float:
        """κ_crit as paper 001 prints it (Eq. 6), a constant of the worker: announced seconds of a
        token's products over those of its load, without attention, reads and fixed costs."""
        return self.step.token_s * self.node.h2d_bytes_per_s / self.kv_bytes_per_token

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
    """The engine admitted a request: its prompt's tokens by source, which is final."""

    request_id: str
    device_tokens: int
    host_tokens: int
    new_tokens: int
    disk_tokens: int = 0  # of `host_tokens`, those from disk


class Arrival(_ReportRow, frozen=True):
    """A request at the worker, from any decider, with that decider's expectation.

    Tokens are the prompt's by source; all zero where the decider expected nothing.
    """

    request_id: str
    device_tokens: Count = 0
    host_tokens: Count = 0
    new_tokens: Count = 0
    max_tokens: Count = 0  # the client's bound on generated tokens; 0: none
    prefilled: bool = False  # its prompt is computed
    disk_tokens: Count = 0  # of `host_tokens`


class Spent(_ReportRow, frozen=True):
    """Real seconds spent on a request until its prompt was computed."""

    request_id: str
    load_s: float  # link time of its own load
    compute_s: float  # of the steps that computed its prompt, which may have served others too


class StepSample(_ReportRow, frozen=True):
    """A step of the engine: its work (`kappa.cost.StepWork`), and real seconds."""

    tokens: float
    pairs: float
    reads: float
    seconds: float


class LoadSample(_ReportRow, frozen=True, omit_defaults=True):
    """Tokens that were loaded together, and real seconds of the link."""

    tokens: float
    seconds: float
    disk_tokens: float = 0.0  # of `tokens`, those from disk


def _size(tokens: float) -> int:
    return min(int(tokens).bit_length(), SAMPLES - 1)


class Samples:
    """Samples of steps and loads for the next report: the latest of each size, a power of two.

    So the many steps that decode leave room for the few that prefill; `SAMPLES` of each at most.
    """

    def __init__(self) -> None:
        self._steps: dict[int, StepSample] = {}
        self._loads: dict[tuple[bool, int], LoadSample] = {}

    def add_step(self, work: StepWork[float], seconds: float) -> None:
        """Note a step's work and real seconds."""
        self._steps[_size(work.tokens)] = StepSample(*work, seconds)

    def add_load(self, tokens: float, seconds: float, disk_tokens: float = 0.0) -> None:
        """Note a load's tokens, those of them from disk, and real seconds of the link."""
        sample = LoadSample(tokens, seconds, disk_tokens)
        self._loads[disk_tokens > 0, _size(tokens)] = sample

    def take(self) -> tuple[tuple[StepSample, ...], tuple[LoadSample, ...]]:
        """The samples since the last call, which are then forgotten."""
        taken = tuple(self._steps.values()), tuple(self._loads.values())
        self._steps, self._loads = {}, {}
        return taken


_Request = TypeVar("_Request", Admission, Arrival, Spent)


class Charge(NamedTuple):
    """Use of one worker, in seconds of the whole resource."""

    vram_s: float = 0.0  # share of all blocks held, times seconds
    gpu_s: float = 0.0  # share of an iteration's tokens, times its seconds
    link_s: float = 0.0  # seconds of loading


class TenantCharge(_ReportRow, frozen=True):
    """A tenant's use of the reporting worker since its start; see `Charge`."""

    tenant: str
    vram_s: Seconds
    gpu_s: Seconds
    link_s: Seconds

    @property
    def charge(self) -> Charge:
        return Charge(self.vram_s, self.gpu_s, self.link_s)


class WorkerReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker's measurements since its last report, and its totals since it started.

    Seconds are real (dilated on a paced node). `*_total` never fall within one worker's life.
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
    # Fetched from other workers' host tiers.
    fetch_tokens_total: int = 0
    fetch_bytes_total: int = 0
    fetch_seconds_total: float = 0.0
    # Speed of these fetches, an EWMA; 0: not known.
    net_tokens_per_s: float = 0.0
    event_gaps_total: int = 0
    # Blocks of the host tier that are unused, or only copies of other workers' blocks.
    host_spare_blocks: int = 0
    # Iterations of the engine's scheduler; those with a non-empty queue, and over these the sums of
    # the shares of the token budget and of the blocks in use.
    iterations_total: int = 0
    queued_iterations_total: int = 0
    budget_fill_sum: float = 0.0
    vram_fill_sum: float = 0.0
    # How often a waiting request was looked at and left, by reason.
    passed_total: Mapping[str, int] = {}
    # Failures of an LMCache server, a disk or a peer, by operation.
    tier_failures_total: Mapping[str, int] = {}
    rule_errors_total: int = 0
    preemptions_total: int = 0
    stores_dropped_total: int = 0
    failed_loads_total: int = 0
    misused_blocks_total: int = 0
    # Watts that its GPUs draw, and may draw.
    power_w: float = 0.0
    power_cap_w: float = 0.0
    energy_j_total: float = 0.0
    # What the model says that they used in the same time; 0 where it knows no such GPU.
    modelled_j_total: float = 0.0
    power_source: str = ""  # nvml, model or paced (modelled, in emulated time); empty: not known
    # Requests in the last iteration.
    waiting: int = 0
    loading: int = 0
    running: int = 0
    # Requests of this report only, since the last one.
    admitted: tuple[Admission, ...] = ()
    prefilled: tuple[str, ...] = ()
    spent: tuple[Spent, ...] = ()
    # A choice of the steps and loads that the totals count (`Samples`).
    steps: tuple[StepSample, ...] = ()
    loads: tuple[LoadSample, ...] = ()
    # Cumulative; at least the tenants with a charge that changed since the last report.
    charges: tuple[TenantCharge, ...] = ()
    # Requests that came to the replica, and that left it, since the last report.
    arrived: tuple[Arrival, ...] = ()
    finished: tuple[str, ...] = ()
    # Tokens of the answers of finished requests, by request; none if there are none.
    generated: Mapping[str, Count] = {}
    # Finished requests that the engine failed while it answered them.
    failed: tuple[str, ...] = ()
    # All requests at the replica, now and then and after every snapshot; else None.
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
        """The same report with all requests renamed by `name`."""

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

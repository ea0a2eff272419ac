"""Pools: workers with the same engine arguments on nodes of one kind, how many, and where.

A pool serves the cluster's model or names one of its own, and the ingress chooses across all pools
of the model that a request asks for. `nodes` of the cluster file is the short form: each of them
becomes a pool of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError, model_validator

from kappa.hardware import NodeProfile, node_profile
from kappa.model import ModelShape
from kappa.settings.base import Fault, Finite, Section, faults_in
from kappa.settings.engine import EngineSettings
from kappa.shapes import model_shape

Role = Literal["both", "prefill", "decode"]

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]

LabelText = Annotated[str, Field(min_length=1)]


def _known_profile(value: str) -> str:
    node_profile(value)
    return value


def _known_model(value: str) -> str:
    model_shape(value)
    return value


ProfileName = Annotated[str, AfterValidator(_known_profile)]

ShapeName = Annotated[str, AfterValidator(_known_model)]

# Where these differ, blocks of one worker mean nothing to another.
SHARED_ENGINE_KEYS = frozenset({"kind", "block_tokens", "dtype"})


class Placement(Section):
    """What a machine must offer for one worker of a pool. Ray chooses among those that do."""

    cpus: Finite = Field(1.0, ge=0.1, description="of Ray's CPUs, for the replica")
    gpus: int = Field(0, ge=0, description="GPUs of one worker; zero runs vLLM's CPU engine")
    resources: dict[str, Annotated[Finite, Field(gt=0)]] = Field(
        default_factory=dict, description="Ray's custom resources, such as {pool-gh200: 1}"
    )
    labels: dict[LabelText, LabelText] = Field(
        default_factory=dict, description="labels of Ray nodes, such as {ray.io/node-group: gh200}"
    )


class ScalingSettings(Section):
    """How many workers a pool has, by the seconds of work that wait for it."""

    min_replicas: int = Field(1, ge=1)
    max_replicas: int = Field(ge=1)
    target_backlog_s: Finite = Field(
        5.0, gt=0, description="what waits is to be worked off within so long"
    )
    target_utilisation: Finite = Field(
        0.8, gt=0, le=1, description="share of time that a worker's busier resource may be busy"
    )
    up_after_s: Finite = Field(10.0, ge=0, description="wanted so long before workers are added")
    down_after_s: Finite = Field(
        300.0, ge=0, description="unwanted so long before workers are drained"
    )

    @model_validator(mode="after")
    def _bounds_in_order(self) -> ScalingSettings:
        if self.max_replicas < self.min_replicas:
            raise ValueError(
                f"max_replicas is {self.max_replicas}, less than min_replicas "
                f"{self.min_replicas}: raise the one or lower the other"
            )
        return self


class ModelSettings(Section):
    """Which model is served. Without a `source` a tiny random one is made from `seed`."""

    id: str = Field("kappa-tiny", min_length=1, description="name that clients use")
    source: str | None = Field(
        None, description="folder, Hugging Face name or smollm2-135m; none: made"
    )
    seed: int = Field(0, ge=0, description="seed of the made model")
    emulate: ShapeName = Field("llama-3.1-8b", description="model whose cost a paced node emulates")
    adapters: dict[Annotated[str, Field(min_length=1)], str] = Field(
        default_factory=dict,
        description="LoRA adapters: the name that clients use, and its folder",
    )

    @model_validator(mode="after")
    def _adapters_have_names_of_their_own(self) -> ModelSettings:
        if self.id in self.adapters:
            raise ValueError(f"adapter {self.id!r} has the name of its model: give it another")
        return self

    @property
    def emulated_shape(self) -> ModelShape:
        """The shape that paced nodes price and pace."""
        return model_shape(self.emulate)


class PoolSettings(Section):
    """Workers alike: their hardware, their number, their place, their share of the work."""

    name: Name
    model: ModelSettings | None = Field(None, description="what it serves; none: the cluster's")
    profile: ProfileName = Field(
        description="catalogue name or profile JSON: prior, or what to pace as"
    )
    paced: bool = Field(False, description="on a CPU machine, act as fast as the profile")
    replicas: int | None = Field(None, ge=1, description="fixed number of workers; none: one")
    autoscaling: ScalingSettings | None = None
    role: Role = Field("both", description="prefill: hands its KV over; decode: takes it over")
    cost_per_hour: Finite | None = Field(None, gt=0, description="of one worker, any currency")
    drain_s: Finite = Field(
        60.0, gt=0, description="a worker that is to go has so long to end its streams"
    )
    placement: Placement = Placement()
    engine: dict[str, Any] = Field(
        default_factory=dict, description="what differs from the cluster's engine section"
    )

    @model_validator(mode="after")
    def _one_way_to_count(self) -> PoolSettings:
        if self.replicas is not None and self.autoscaling is not None:
            raise ValueError("replicas and autoscaling are both given: drop one")
        return self

    @property
    def least(self) -> int:
        """Workers at start."""
        return self.autoscaling.min_replicas if self.autoscaling else self.replicas or 1

    @property
    def most(self) -> int:
        """Workers at most."""
        return self.autoscaling.max_replicas if self.autoscaling else self.replicas or 1

    @property
    def node_names(self) -> tuple[str, ...]:
        """What its workers' nodes are called, by rank."""
        if self.most == 1:
            return (self.name,)
        return tuple(f"{self.name}-{rank}" for rank in range(self.most))

    def engine_settings(self, shared: EngineSettings) -> EngineSettings:
        """The cluster's engine section with what this pool changes, and with limits where vLLM does
        not choose them itself."""
        changed = EngineSettings.model_validate({**shared.model_dump(), **self.engine})
        return changed.on(self.placement.gpus)


def pool_faults(pools: Any, shared: ModelSettings | None = None) -> list[Fault]:
    """What is wrong between pools, as they stand in the file: some may be misshapen themselves.

    shared: the cluster's model, of pools that name none.
    """
    if not isinstance(pools, list | tuple):
        return []
    names = [value_of(pool, "name") for pool in pools]
    found: list[Fault] = [
        ((number, "name"), f"pool {names.index(name)} is called {name!r}, too: names must differ")
        for number, name in enumerate(names)
        if isinstance(name, str) and names.index(name) < number
    ]
    models = [_model_of(pool, shared) for pool in pools]
    for served in dict.fromkeys(model and model.id for model in models):
        of_it = [
            p for p, model in zip(pools, models, strict=True) if (model and model.id) == served
        ]
        roles = {value_of(pool, "role") or "both" for pool in of_it}
        whose = f" of model {served}" if len(of_it) < len(pools) else ""
        if roles == {"prefill"}:
            why = f"every pool's role{whose} is prefill, and nobody would decode: make one both"
            found.append(((), why))
        if roles == {"decode"}:
            why = f"every pool's role{whose} is decode, and nobody hands over: make one both"
            found.append(((), why))
    return found + _model_faults(models)


def _model_of(pool: Any, shared: ModelSettings | None) -> ModelSettings | None:
    """The model that a pool serves; None if what it says of it is misshapen, or nothing is said."""
    try:
        given = value_of(pool, "model")
        return shared if given is None else ModelSettings.model_validate(given)
    except ValidationError:
        return None


def _model_faults(models: Sequence[ModelSettings | None]) -> list[Fault]:
    """Of pools, by number: two models under one name, or an adapter under another's name."""
    found: list[Fault] = []
    first: dict[str, tuple[int, ModelSettings]] = {}
    for number, model in enumerate(models):
        if model is None:
            continue
        other, same = first.setdefault(model.id, (number, model))
        for name in ModelSettings.model_fields:
            here, there = getattr(model, name), getattr(same, name)
            if here != there:
                why = f"pool {other} calls its model {model.id!r}, too, and there {name} is "
                why += f"{there!r}, here {here!r}: one name is one model"
                found.append(((number, "model", name), why))
    taken = {name: f"model {name!r}" for name in first}
    for number, model in first.values():
        for adapter in model.adapters:
            if adapter in taken:
                why = f"adapter {adapter!r} has the name of {taken[adapter]}: give it another"
                found.append(((number, "model", "adapters"), why))
            taken[adapter] = f"an adapter of model {model.id!r}"
    return found


def engine_faults(pools: Any, shared: Any) -> list[Fault]:
    """What is wrong with pools' own engine arguments, beside the cluster's `engine` section, and
    with that section on the machines where it is used."""
    base: Any = {"kind": shared} if isinstance(shared, str) else shared or {}
    base = base.model_dump() if isinstance(base, EngineSettings) else base
    if not isinstance(base, dict):
        return []
    listed = pools if isinstance(pools, list | tuple) else ()
    here = [_gpus_of(pool) for pool in listed if not value_of(pool, "engine")]
    # What is wrong wherever it runs, pydantic finds itself.
    anywhere, unfit = _engine_faults(base, 1), []
    if not anywhere and (0 in here or not listed):
        unfit = _engine_faults(base, 0)
    found: list[Fault] = [(("engine", *loc), reason) for loc, reason in unfit]
    known = {loc[0] for loc, _ in anywhere + unfit if loc}
    for number, pool in enumerate(listed):
        own = value_of(pool, "engine")
        if not isinstance(own, dict):
            continue
        where = ("pools", number, "engine")
        found += [
            ((*where, key), "is the same in all pools, or their blocks would not match: give it "
             "in the section engine")
            for key in sorted(own.keys() & SHARED_ENGINE_KEYS)
            if key == "kind" or not _all_of_its_model_give(key, pool, listed)
        ]  # fmt: skip
        found += [
            ((*where, *loc), reason)
            for loc, reason in _engine_faults({**base, **own}, _gpus_of(pool))
            if (loc and loc[0] in own) or (not loc and not known)
        ]
    return found


def _all_of_its_model_give(key: str, pool: Any, pools: Sequence[Any]) -> bool:
    """Whether a pool names its model, and every pool that names it has the same value of `key`."""
    name = _named_model(pool)
    values = {
        str(value_of(value_of(other, "engine") or {}, key))
        for other in pools
        if _named_model(other) == name
    }
    return name is not None and len(values) == 1


def _named_model(pool: Any) -> Any:
    return value_of(value_of(pool, "model") or {}, "id")


def _gpus_of(pool: Any) -> int:
    gpus = value_of(value_of(pool, "placement") or {}, "gpus")
    return gpus if isinstance(gpus, int) else 0


def _engine_faults(data: dict[str, Any], gpus: int) -> list[Fault]:
    try:
        EngineSettings.model_validate(data).on(gpus)
    except ValidationError as error:
        return faults_in(error)
    return []


def value_of(part: Any, key: str) -> Any:
    """A part's value, whether it is validated already or not."""
    return part.get(key) if isinstance(part, dict) else getattr(part, key, None)


class NodeSettings(Section):
    """One worker: the hardware that it is, or on a CPU machine the one that it is paced as."""

    name: Name
    profile: ProfileName = Field(description="catalogue name or profile JSON")
    paced: bool = True

    def node(self, dilation: float) -> NodeProfile:
        """The profile to pace by, in dilated time."""
        profile = node_profile(self.profile)
        return replace(profile, name=self.name, source="paced", dilation=dilation)


def node_faults(nodes: Any) -> list[Fault]:
    """What is wrong between nodes, as they stand in the file."""
    if not isinstance(nodes, list | tuple):
        return []
    names = [str(value_of(node, "name")) for node in nodes]
    if len(set(names)) < len(names):
        return [((), f"two nodes share a name among {names}: names must differ")]
    return []

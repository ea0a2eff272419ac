"""Pools of workers with the same engine arguments on nodes of one kind: number and placement.

A pool serves the cluster's model or names one of its own, and the decider chooses across all pools
of the model that a request asks for. `nodes` of the cluster file is the short form: each of them
becomes a pool of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from kappa.hardware import node_profile
from kappa.model import ModelShape
from kappa.settings.base import Fault, Finite, Section, faults_in, read_by
from kappa.settings.engine import EngineSettings
from kappa.shapes import model_shape
from kappa.silicon import silicon_of, silicon_table

Role = Literal["both", "prefill", "decode"]

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]

LabelText = Annotated[str, Field(min_length=1)]


ProfileName = Annotated[str, read_by(node_profile)]

ShapeName = Annotated[str, read_by(model_shape)]

SiliconName = Annotated[str, read_by(silicon_table)]

# Where these differ, blocks of one worker mean nothing to another.
SHARED_ENGINE_KEYS = frozenset({"kind", "block_tokens", "dtype"})


class Placement(Section):
    """Requirements of one worker on its machine. Ray chooses among machines that meet them."""

    cpus: Finite = Field(1.0, ge=0.1, description="of Ray's CPUs, for the replica")
    gpus: int = Field(0, ge=0, description="GPUs of one worker; zero runs vLLM's CPU engine")
    resources: dict[str, Annotated[Finite, Field(gt=0)]] = Field(
        default_factory=dict, description="Ray's custom resources, such as {pool-gh200: 1}"
    )
    labels: dict[LabelText, LabelText] = Field(
        default_factory=dict, description="labels of Ray nodes, such as {ray.io/node-group: gh200}"
    )


class ScalingSettings(Section):
    """Bounds and targets of a pool that scales with the work that waits for it."""

    min_replicas: int = Field(1, ge=1)
    max_replicas: int = Field(ge=1)
    target_backlog_s: Finite = Field(
        5.0, gt=0, description="seconds within which the waiting work is to be done"
    )
    target_utilisation: Finite = Field(
        0.8, gt=0, le=1, description="share of time that a worker's busier resource may be busy"
    )
    up_after_s: Finite = Field(10.0, ge=0, description="how long wanted before workers are added")
    down_after_s: Finite = Field(
        300.0, ge=0, description="how long unwanted before workers are drained"
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
    """The model that is served. Without a `source` a tiny random one is made from `seed`."""

    id: str = Field("kappa-tiny", min_length=1, description="name that clients use")
    source: str | None = Field(
        None, description="folder, Hugging Face name or smollm2-135m; none: made"
    )
    seed: int = Field(0, ge=0, description="seed of the made model")
    emulate: ShapeName = Field("llama-3.1-8b", description="model that paced nodes emulate")
    adapters: dict[Annotated[str, Field(min_length=1)], str] = Field(
        default_factory=dict, description="LoRA adapters: the name that clients use, and its folder"
    )

    @model_validator(mode="after")
    def _adapters_have_names_of_their_own(self) -> ModelSettings:
        if self.id in self.adapters:
            raise ValueError(f"adapter {self.id!r} has the name of its model: give it another")
        return self

    @property
    def emulated_shape(self) -> ModelShape:
        """The shape that paced nodes are priced and paced by."""
        return model_shape(self.emulate)


class PoolSettings(Section):
    """Workers of one kind: model, hardware, number, placement and role."""

    name: Name
    model: ModelSettings | None = Field(None, description="what it serves; none: the cluster's")
    profile: ProfileName = Field(
        description="catalogue name or profile JSON: prior, or what to pace as"
    )
    paced: bool = Field(False, description="on a CPU machine, act as fast as the profile")
    silicon: SiliconName | None = Field(
        None, description="paced: table of real GPUs that steps last by; none: the cost law"
    )
    replicas: int | None = Field(None, ge=1, description="fixed number of workers; none: one")
    autoscaling: ScalingSettings | None = None
    role: Role = Field("both", description="prefill: hands its KV over; decode: takes it over")
    cost_per_hour: Finite | None = Field(None, gt=0, description="of one worker, any currency")
    drain_s: Finite = Field(
        60.0, gt=0, description="seconds for a worker that is removed to end its streams"
    )
    placement: Placement = Placement()
    engine: dict[str, Any] = Field(
        default_factory=dict, description="differences from the cluster's engine section"
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
        """Names of its workers' nodes, by rank."""
        if self.most == 1:
            return (self.name,)
        return tuple(f"{self.name}-{rank}" for rank in range(self.most))

    def engine_settings(self, shared: EngineSettings) -> EngineSettings:
        """The cluster's engine section with this pool's changes, and with limits where vLLM does
        not choose them itself."""
        changed = EngineSettings.model_validate({**shared.model_dump(), **self.engine})
        return changed.on(self.placement.gpus)


def pool_faults(pools: Sequence[PoolSettings], shared: ModelSettings) -> list[Fault]:
    """Faults between pools; shared: the model of pools that name none."""
    names = [pool.name for pool in pools]
    found: list[Fault] = [
        (
            ("pools", number, "name"),
            f"pool {names.index(name)} is called {name!r}, too: names must differ",
        )
        for number, name in enumerate(names)
        if names.index(name) < number
    ]
    models = [pool.model or shared for pool in pools]
    for served in dict.fromkeys(model.id for model in models):
        roles = [p.role for p, model in zip(pools, models, strict=True) if model.id == served]
        of_model = f" of model {served}" if len(roles) < len(pools) else ""
        lacking = {"prefill": "nobody would decode", "decode": "nobody hands over"}.get(roles[0])
        if lacking and set(roles) == {roles[0]}:
            why = f"every pool's role{of_model} is {roles[0]}, and {lacking}: make one both"
            found.append((("pools",), why))
    return found + _model_faults(models)


def _model_faults(models: Sequence[ModelSettings]) -> list[Fault]:
    """Faults of models, by pool: two under one name, or an adapter with another's name."""
    found: list[Fault] = []
    first: dict[str, tuple[int, ModelSettings]] = {}
    for number, model in enumerate(models):
        other, same = first.setdefault(model.id, (number, model))
        for name in ModelSettings.model_fields:
            here, there = getattr(model, name), getattr(same, name)
            if here != there:
                why = f"pool {other} calls its model {model.id!r}, too, and there {name} is "
                why += f"{there!r}, here {here!r}: one name is one model"
                found.append((("pools", number, "model", name), why))
    taken = {name: f"model {name!r}" for name in first}
    for number, model in first.values():
        for adapter in model.adapters:
            if adapter in taken:
                why = f"adapter {adapter!r} has the name of {taken[adapter]}: give it another"
                found.append((("pools", number, "model", "adapters"), why))
            taken[adapter] = f"an adapter of model {model.id!r}"
    return found


def silicon_faults(
    pools: Sequence[PoolSettings], shared: ModelSettings, section: str
) -> list[Fault]:
    """Faults of tables of real GPUs; shared: the model of pools that name none; section: of the
    file, with these pools in order."""
    found: list[Fault] = []
    for number, pool in enumerate(pools):
        shape, where = (pool.model or shared).emulated_shape, (section, number, "silicon")
        if pool.silicon is not None and not pool.paced:
            why = "only a paced worker lasts by a table: say 'paced: true', or drop it"
            found.append((where, why))
        elif pool.silicon is not None:
            try:
                silicon_of(shape, pool.silicon)
            except ValueError as error:
                found.append((where, f"model.emulate is {shape.name}, and {error}"))
    return found


def engine_faults(pools: Sequence[PoolSettings], shared: EngineSettings) -> list[Fault]:
    """Faults of pools' own engine arguments together with the cluster's `engine` section, and of
    that section on the machines where it is used."""
    is_used = not pools or any(not pool.engine and not pool.placement.gpus for pool in pools)
    unfit = _faults_of(partial(shared.on, 0)) if is_used else []
    found: list[Fault] = [(("engine", *loc), reason) for loc, reason in unfit]
    for number, pool in enumerate(pools):
        where = ("pools", number, "engine")
        found += [
            ((*where, key), "is the same in all pools, or their blocks would not match: give it "
             "in the section engine")
            for key in sorted(pool.engine.keys() & SHARED_ENGINE_KEYS)
            if key == "kind" or not _all_of_its_model_give(key, pool, pools)
        ]  # fmt: skip
        if pool.engine:
            own = _faults_of(partial(pool.engine_settings, shared))
            found += [((*where, *loc), reason) for loc, reason in own if loc or not unfit]
    return found


def _all_of_its_model_give(key: str, pool: PoolSettings, pools: Sequence[PoolSettings]) -> bool:
    """Whether a pool names its model, and every pool that names it has the same value of `key`."""
    if pool.model is None:
        return False
    served = pool.model.id
    values = {str(p.engine.get(key)) for p in pools if p.model and p.model.id == served}
    return len(values) == 1


def _faults_of(made: Callable[[], EngineSettings]) -> list[Fault]:
    try:
        made()
    except ValidationError as error:
        return faults_in(error)
    return []


class NodeSettings(Section):
    """One worker: its hardware, or on a CPU machine the hardware that it is paced as."""

    name: Name
    profile: ProfileName = Field(description="catalogue name or profile JSON")
    paced: bool = True
    silicon: SiliconName | None = None

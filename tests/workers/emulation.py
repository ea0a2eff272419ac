"""Plans of emulated engines whose steps and loads take microseconds."""

from dataclasses import replace

from kappa.hardware import node_profile
from kappa.model import ModelShape
from workers.identity import WorkerPlan
from workers.own_engine.server import OwnPlan

# Two bytes of KV and a hundred FLOPs per token.
SHAPE = ModelShape("small", 1, 1, 1, 1, 1, 50.0, 50.0, "mha", 1.0)


def emulated_plan(worker, limits, endpoints, source="paced"):
    node = replace(
        node_profile("pcie"), source=source, h2d_bytes_per_s=2e6, flops_per_s=1e8,
        hbm_bytes_per_s=1e6, load_fixed_s=0.0, step_fixed_s=0.0,
    )  # fmt: skip
    plan = WorkerPlan((node,), SHAPE, SHAPE, limits, "m", "", "", "", kind="emulated")
    return OwnPlan(plan, worker, 0, endpoints)

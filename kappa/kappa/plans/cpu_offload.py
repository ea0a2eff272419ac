"""Paper 002: what the CPU computes of a decoding step while the MLP's weights cross the link.

Its Fig. 3 and 4: with a small batch the CPU computes attention whole, projections included, and
`fc1_share` of FC1's columns; with a large one attention takes longer than those weights, so that
its last products' weights cross, too. The paper gives no formula; these follow from link and CPU
being busy for equally long. Seconds are of one layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from kappa.plans.rates import LEAST_GAIN, PlanRates

Product = Literal["qkv", "out"]


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """A decoding step's parts in one layer."""

    # Of the CPU: attention to the contexts, projections of queries, keys and values, that of
    # attention's output, and all of FC1.
    attend_s: float
    qkv_s: float
    out_s: float
    fc1_s: float
    # Of the link, for the weights of each.
    qkv_load_s: float
    out_load_s: float
    fc1_load_s: float
    fc2_load_s: float
    # Of the device, for which the CPU waits: the products of all these weights, less those that
    # the CPU computes, and what no division moves.
    device_s: float = 0.0
    other_s: float = 0.0


class Division(NamedTuple):
    """What the CPU computes besides attention."""

    products: tuple[Product, ...]
    # Of FC1's columns, the first ones.
    fc1_share: float = 0.0


def busy_s(times: LayerTimes, division: Division) -> tuple[float, float]:
    """(link, CPU and device) seconds of a layer."""
    qkv, out = (name in division.products for name in ("qkv", "out"))
    share = division.fc1_share
    link_s = times.fc2_load_s + (1.0 - share) * times.fc1_load_s
    link_s += (not qkv) * times.qkv_load_s + (not out) * times.out_load_s
    cpu_s = times.attend_s + qkv * times.qkv_s + out * times.out_s + share * times.fc1_s
    whole_s = times.qkv_load_s + times.out_load_s + times.fc1_load_s + times.fc2_load_s
    # The device multiplies by the weights that cross, in seconds that go by their bytes.
    device_s = times.device_s * link_s / whole_s if whole_s else 0.0
    return link_s, cpu_s + device_s + times.other_s


def fc1_share(times: LayerTimes) -> float:
    """α*: link and CPU take equally long where attention is the CPU's, within [0, 1]:

    (W_FFN/B - t_MHA) / (W_1/B + t_FC1), where t_FC1 is less by what the device is spared of FC1.
    """
    link_s, cpu_s = busy_s(times, Division(("qkv", "out")))
    least_s, most_s = busy_s(times, Division(("qkv", "out"), 1.0))
    if most_s <= cpu_s:  # The CPU is faster than the device.
        return 1.0
    return min(max((link_s - cpu_s) / (link_s - least_s + most_s - cpu_s), 0.0), 1.0)


def divide(times: LayerTimes) -> Division:
    """The division with the shortest step: attention alone, with its first products, or all of it
    and α* of FC1. The CPU takes on products only for a gain: each crosses to it and back."""
    found = Division(())
    for more in (Division(("qkv",)), Division(("qkv", "out"), fc1_share(times))):
        if max(busy_s(times, more)) < (1.0 - LEAST_GAIN) * max(busy_s(times, found)):
            found = more
    return found


def layer_times(rates: PlanRates, batch: int, context_tokens: int) -> LayerTimes:
    """The parts for `batch` sequences of so many tokens each.

    Raises:
        ValueError: attention or products of the CPU are not measured.
    """
    if rates.attend is None or rates.multiply is None:
        raise ValueError(
            f"{rates.name}: products of the CPU are not measured: give the engine cpu_threads, and "
            "weights.place host with share 1"
        )
    busy, matrices = rates.attending(), rates.matrix_bytes
    assert busy.attend is not None and busy.multiply is not None
    layer = 1.0 / rates.layers
    fc1_s = busy.multiply.seconds(batch) * layer
    qkv, out, fc1, fc2 = (busy.weights_s * layer * size / sum(matrices) for size in matrices)
    qkv_cpu, out_cpu = (fc1_s * size / matrices[2] for size in matrices[:2])
    step_s, other_s = rates.decode_gpu_s(batch, 0) * layer, rates.step.fixed_s * layer
    attend_s = batch * busy.attend.seconds(context_tokens) * layer
    return LayerTimes(
        attend_s, qkv_cpu, out_cpu, fc1_s, qkv, out, fc1, fc2, max(0.0, step_s - other_s), other_s
    )

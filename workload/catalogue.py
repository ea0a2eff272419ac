"""Workloads by name or by path: the five that ship with the package, and files of their formats.

The simulator, the load test and the benchmarks all ask here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from workload import arrivals
from workload.azure import read_azure
from workload.errors import WorkloadError
from workload.miniswe import read_miniswe
from workload.mooncake import read_mooncake
from workload.narrativeqa import read_narrativeqa
from workload.shapes import Workload
from workload.sharegpt import read_sharegpt_table

_DATA = Path(__file__).parent / "data"

_BUILT_IN: dict[str, Callable[[], Workload]] = {
    "narrativeqa": lambda: read_narrativeqa(_DATA / "narrativeqa_lengths.jsonl.gz"),
    "mooncake": lambda: read_mooncake(_DATA / "mooncake_conversation.jsonl.gz"),
    "miniswe": lambda: read_miniswe(_DATA / "miniswe_lengths.parquet"),
    "sharegpt": lambda: read_sharegpt_table(_DATA / "sharegpt_turns.parquet"),
    "azure": lambda: read_azure(_DATA / "azure2023_conv.csv.gz"),
}


def workload_named(name_or_path: str) -> Workload:
    """A built-in workload by its name, or the one in a file."""
    built_in = _BUILT_IN.get(name_or_path)
    if built_in is None:
        raise WorkloadError(f"no workload {name_or_path!r}: one of {', '.join(_BUILT_IN)}")
    return built_in()


def arrivals_for(workload_name: str) -> arrivals.ArrivalProcess:
    """How sessions of a built-in workload arrive."""
    return arrivals.servegen if workload_name == "azure" else arrivals.poisson

"""A forward pass over layers on two resources, event by event: the oracle of the closed forms.

It knows no formula: a link and a gpu each do one job at a time, in order of the layers, and a
layer is computed when it is loaded.
"""

from __future__ import annotations

import heapq


def simulate(load_s: float, compute_s: float, layers: int) -> float:
    """Seconds at which the last of equal layers is computed."""
    job_s = {"link": load_s / layers, "gpu": compute_s / layers}
    done = {"link": 0, "gpu": 0}
    busy: set[str] = set()
    events: list[tuple[float, str]] = []
    now_s = 0.0
    while done["gpu"] < layers:
        loaded = done["link"] if load_s else layers
        waits = {"link": load_s > 0 and done["link"] < layers, "gpu": done["gpu"] < loaded}
        for resource, wanted in waits.items():
            if wanted and resource not in busy:
                busy.add(resource)
                heapq.heappush(events, (now_s + job_s[resource], resource))
        now_s, resource = heapq.heappop(events)
        busy.remove(resource)
        done[resource] += 1
    return now_s

"""A request's way through a decider, as its telemetry hears it, and its worker's report."""

from types import SimpleNamespace

from kappa.protocol import Admission


def reported(load_s, compute_s, device=0, cached=0, new=0, ttft_s=None, disk=0):
    """The record of a request with a full report of its worker; disk: of the cached tokens."""
    admitted = Admission("r", device, cached, new, disk)
    spent = SimpleNamespace(load_s=load_s, compute_s=compute_s)
    return SimpleNamespace(spent=spent, admitted=admitted, ttft_s=ttft_s, generated_tokens=7)


def decision(worker="w1", node="pcie", reason="load"):
    """A decision, as far as telemetry reads it."""
    chosen = SimpleNamespace(node=SimpleNamespace(name=node))
    return SimpleNamespace(chosen=chosen, worker=worker, reason=reason)


def served(telemetry, request_id="r", traceparent="", end=("done", 200)):
    """A request from 10 s on, its first token at 11.13 s, its end at 12 s."""
    timeline = telemetry.begin(request_id, "alice", 10.0, traceparent)
    timeline.tokenized(500, 10.1)
    timeline.decided(decision(), 10.13)
    timeline.first_item(11.13)
    telemetry.end(timeline, *end, 12.0)
    return timeline

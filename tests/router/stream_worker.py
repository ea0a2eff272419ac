"""A worker for tests of the live router: a real report stream, no engine."""

from dataclasses import replace
from types import SimpleNamespace

import zmq

from kappa.hardware import node_profile
from kappa_workers.report_stream import ReportStream
from kappa_workers.stats_channel import StatsSender
from tests.router.building import SIZE as SIZE
from tests.router.building import small
from tests.router.kv_batches import batch, stored
from tests.router.patience import PATIENCE_S


class StreamWorker:
    """A replica's report stream, with the engine's ends in the test's hands."""

    def __init__(self, name, folder):
        self.name, self.context, self.seq = name, zmq.Context(), 0
        kv = f"ipc://{folder}/{name}-kv"
        self.kv = self.context.socket(zmq.XPUB)
        self.kv.bind(kv)
        self.stream = ReportStream(name, "127.0.0.1", f"ipc://{folder}/{name}-stats", kv)
        self.stats = StatsSender(f"ipc://{folder}/{name}-stats")
        self.stream.start()
        assert self.kv.poll(PATIENCE_S * 1000), "the stream never listened"
        self.kv.recv()

    def announcement(self, **changes):
        node = replace(node_profile("pcie"), name=f"node-{self.name}", source="paced")
        return small(
            self.name, node, emulated_model="llama-3.1-8b", host_blocks=100,
            events_endpoint=self.stream.events_endpoint,
            snapshot_endpoint=self.stream.snapshot_endpoint, **changes,
        ).to_dict()  # fmt: skip

    def store(self, *names, start=0):
        """The engine stores blocks of tokens counted from `start`."""
        tokens = list(range(start, start + SIZE * len(names)))
        self.tell(stored(names, size=SIZE, token_ids=tokens))

    def tell(self, *events):
        """One batch of KV events, as vLLM publishes it."""
        self.kv.send_multipart([b"kv", self.seq.to_bytes(8, "big"), batch(*events)])
        self.seq += 1

    def arrives(self, request_id, new=4000):
        sent = {"kappa_request_id": request_id, "kappa_prompt_tokens": new}
        body = SimpleNamespace(vllm_xargs=sent, max_tokens=8)
        self.stream.in_flight.arrived(body, 0.0)

    def finishes(self, request_id):
        self.stream.in_flight.ended(request_id)

    def admit(self, request_id, device, host, new):
        self.stats.send({"kind": "admit", "request_id": request_id, "device_tokens": device,
                         "host_tokens": host, "new_tokens": new, "t_s": 0.0})  # fmt: skip

    def step(self, *prefilled):
        spent = [(request_id, 2e-6, 1e-6) for request_id in prefilled]
        self.stats.send({"kind": "step", "tokens": 1, "running": 1, "prefilled": list(prefilled),
                         "spent": spent, "pace_s": 0.1, "took_s": 0.1, "real_s": 0.1,
                         "overrun": True, "t_s": 0.0})  # fmt: skip

    def close(self):
        self.stream.close()
        self.context.destroy(linger=0)

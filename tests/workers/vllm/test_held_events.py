"""KV events of several iterations leave as one batch, in their order and in time."""

from types import SimpleNamespace

from kappa_workers.vllm.scheduler import HeldEvents


class Publisher:
    def __init__(self):
        self.batches, self.running, self.config = [], True, "zmq"

    def publish(self, batch):
        self.batches.append(batch.events)

    def shutdown(self):
        self.running = False


def batch(*events):
    return SimpleNamespace(events=list(events))


def test_batch_leaves_after_a_pause_when_idle_and_at_shutdown():
    publisher = Publisher()
    held = HeldEvents(publisher)
    assert held.config == "zmq"
    held.flush(1.0, idle=False)
    assert publisher.batches == []
    held.publish(batch("a"))
    held.flush(1.0, idle=False)
    assert publisher.batches == [["a"]], "at once after a pause"
    held.publish(batch("b"))
    held.flush(1.049, idle=False)
    held.publish(batch("c", "d"))
    assert publisher.batches == [["a"]]
    held.flush(1.06, idle=False)
    assert publisher.batches[1:] == [["b", "c", "d"]]
    held.publish(batch("e"))
    held.flush(1.061, idle=True)
    assert publisher.batches[2:] == [["e"]]
    held.publish(batch("f"))
    held.shutdown()
    assert publisher.batches[3:] == [["f"]] and not publisher.running

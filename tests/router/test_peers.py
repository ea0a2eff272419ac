"""Asking all ingresses; Ray's call to all of them is replaced by a script."""

import pytest

import router.live.peers
from router.live.peers import Peers

pytestmark = pytest.mark.ray


class Handle:
    """Ray's handle of the ingresses, which answer or fail as told."""

    def __init__(self, *answers, error=None):
        self.answers, self.error, self.asked = list(answers), error, []

    def broadcast(self, method, *args):
        self.asked.append((method, *args))
        return self

    async def results_async(self, *, timeout_s, return_exceptions):
        assert timeout_s > 0 and return_exceptions
        if self.error is not None:
            raise self.error
        return self.answers


def peers(handle, replicas=2):
    made = Peers(replicas, "told")
    made._handle = handle
    return made


async def own(what, *args):
    return f"own {what} {args}"


async def test_everybody_answers():
    handle = Handle("one", "two")
    assert await peers(handle).ask(own, "decision", "r") == ["one", "two"]
    assert handle.asked == [("told", "decision", "r")]


async def test_who_fails_is_left_out():
    handle = Handle("one", RuntimeError("died"))
    assert await peers(handle).ask(own, "metrics") == ["one"]


@pytest.mark.parametrize(
    "handle", [Handle(error=TimeoutError()), Handle(RuntimeError("died")), Handle()]
)
async def test_if_nobody_answers_in_time_it_speaks_for_itself(handle):
    assert await peers(handle).ask(own, "metrics") == ["own metrics ()"]


async def test_a_single_ingress_asks_nobody(monkeypatch):
    monkeypatch.delattr(router.live.peers.serve, "get_deployment_handle")
    assert await Peers(1, "told").ask(own, "metrics") == ["own metrics ()"]

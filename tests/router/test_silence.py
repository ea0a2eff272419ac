"""When a worker counts as silent or stalled: by the reports that this process could have read."""

import asyncio
from types import SimpleNamespace

import pytest

from kappa.protocol import WorkerReport
from kappa_router.config import RouterConfig
from kappa_router.live.membership import AwakeClock, Membership, MembershipRule
from kappa_router.live.replica_registry import ReplicaRegistry
from kappa_router.live.waiting import WorkerLostError, unless_lost
from kappa_router.policy import policy_named
from kappa_router.router import Router
from tests.router.building import Followed, announcement

RULE = {"stall_after_s": 5.0, "lost_after_s": 10.0}


class Scene:
    """Two workers, `now_s` in our hand; the watch of the membership's own sees it stand still."""

    def __init__(self):
        self.now_s = 1000.0
        self.router = Router(RouterConfig(policy=policy_named("ttft"), secret=1))
        registry = ReplicaRegistry()
        rule = MembershipRule(**RULE, follow=lambda announced, listener: Followed())
        listener = SimpleNamespace(
            worker_joined=self.ignore, worker_left=self.ignore, worker_died=self.ignore,
            node_renamed=self.ignore, breaker_opened=self.ignore, stream_gap=self.ignore,
            task_restarted=self.ignore, stream_flood=self.ignore,
            reported=lambda report: self.router.report(report, self.now_s),
        )  # fmt: skip
        self.members = Membership(self.router, registry, rule, lambda: self.now_s, listener)
        announced = {name: announcement(name) for name in "ab"}
        registry.publish("d", {name: one.to_dict() for name, one in announced.items()})
        self.steps = 0

    def ignore(self, *_):
        pass

    def report(self, workers="ab"):
        self.steps += 1
        for worker in workers:
            self.members.reported(WorkerReport(worker, self.now_s, steps_total=self.steps))

    def turns(self, seconds, workers=""):
        """The loop turns for so long; these report meanwhile."""
        for _ in range(round(seconds / 0.25)):
            self.now_s += 0.25
            self.report(workers)
            self.members.check()

    def standing(self):
        return [self.members.breakers.state(name, self.now_s).standing for name in "ab"]

    async def request(self, worker):
        """A request that waits for the worker's answer, as a task."""
        wait = self.members.waits.begin(worker)
        waiting = asyncio.create_task(unless_lost(wait, asyncio.Event().wait()))
        await asyncio.sleep(0)
        return waiting

    def why(self, worker):
        return self.members.breakers.state(worker, self.now_s).why


@pytest.fixture
async def scene():
    made = Scene()
    await asyncio.sleep(0)
    assert len(made.router.workers) == 2
    made.report()
    yield made
    await made.members.close()


def test_awake_clock_leaves_out_what_the_loop_stood_still():
    times = iter([0.0, 0.25, 0.75, 20.75, 21.0, 20.0])
    clock = AwakeClock(lambda: next(times))
    assert [clock() for _ in range(5)] == [0.25, 0.75, 1.25, 1.5, 0.5]


async def test_worker_that_is_silent_while_the_loop_turns_is_open(scene):
    scene.turns(5.0, "a")
    assert scene.standing() == ["closed", "closed"]
    scene.turns(0.25, "a")
    assert scene.standing() == ["closed", "open"] and scene.why("b") == "silent"


@pytest.mark.parametrize("stands_s", [6.0, 60.0, 3600.0])
async def test_reports_that_were_read_late_open_no_breaker(scene, stands_s):
    waiting = await scene.request("a")
    scene.now_s += stands_s
    scene.members.check()
    assert scene.standing() == ["closed", "closed"]
    assert not scene.members.fault()
    scene.turns(9.0, "ab")
    assert scene.standing() == ["closed", "closed"]
    await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()


async def test_loop_that_stands_again_and_again_opens_no_breaker(scene):
    for _ in range(9):
        scene.now_s += 1.7
        scene.members.check()
    assert scene.standing() == ["closed", "closed"], "4.5 s of nine turns"


@pytest.mark.parametrize("read_first", [False, True])
async def test_standstill_hides_no_silence_that_follows(scene, read_first):
    scene.now_s += 30.0
    if read_first:
        scene.report("ab")
    scene.members.check()
    scene.turns(4.25, "a")
    assert scene.standing() == ["closed", "closed"]
    scene.turns(1.0, "a")
    assert scene.standing() == ["closed", "open"]


async def test_engine_stalls_only_by_turns_of_the_loop(scene):
    waiting = await scene.request("b")
    scene.members.check()
    stuck = WorkerReport("b", scene.now_s, steps_total=scene.steps)
    scene.now_s += 60.0
    scene.members.reported(stuck)
    scene.members.check()
    assert scene.standing() == ["closed", "closed"]
    for _ in range(4 * 60):
        scene.members.reported(stuck)
        scene.turns(0.25, "a")
        if scene.why("b"):
            break
    assert scene.why("b") == "stalled"
    with pytest.raises(WorkerLostError):
        await waiting

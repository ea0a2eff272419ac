"""A cluster of emulated engines that is hurt on purpose: the quick faults, each with its promise.

All faults, and those of vLLM engines, are `./dev faults`, which also holds them to their seconds:
here a machine that is busy with other tests must not break a promise.
"""

import asyncio
import math
import os
from dataclasses import replace

import pytest

from kappa_benchmarks.faults.catalogue import fault_named
from kappa_benchmarks.faults.cluster import Family, Target, environment
from kappa_benchmarks.faults.storm import open_streams
from kappa_benchmarks.faults.traffic import Mix
from kappa_benchmarks.faults.trial import try_fault
from tests.live.conftest import serving
from tests.turns import by_turns

pytestmark = [pytest.mark.live, by_turns(__file__)]

TWO = """
engine: {kind: emulated, device_blocks: 400, max_context_tokens: 4096}
dilation: 2
nodes: [{name: pcie, profile: pcie}, {name: c2c, profile: c2c}]
router: {max_queue: 800, request_timeout_s: 60, admission: false}
"""
MIX = Mix(clients=8, documents=16, words=200)
# The controller last: started anew it may give workers other ranks, and with them other names than
# their engines were told their faults by.
QUICK = (
    "worker_killed", "events_lost", "worker_clock_back", "decider_killed",
    "decider_clock_forward", "controller_killed",
)  # fmt: skip
STREAMS = int(os.environ.get("KAPPA_STREAMS", "200"))


@pytest.fixture(scope="module")
def hurt(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hurt")
    (folder / "home").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(folder).items():
            patch.setenv(name, value)
        with serving(folder, TWO) as ready:
            target = Target(ready["url"], ready["model"], Family(ready["pid"]), folder)
            yield target
            target.close()


@pytest.mark.parametrize("name", QUICK)
def test_a_fault_keeps_its_promise(hurt, name):
    turn = QUICK.index(name)
    fault = replace(fault_named(name), first_answer_s=None, recovery_extra_s=math.inf)
    found = asyncio.run(try_fault(hurt, fault, MIX, seed=turn, turn=turn))
    assert found.kept, f"{'; '.join(found.failed)} ({found.to_dict()})"


def test_many_streams_at_once_all_complete(hurt):
    mix = Mix(words=60, max_tokens=20, timeout_s=300.0)
    seen = asyncio.run(open_streams(hurt, STREAMS, mix, seed=0))
    assert seen.failed == 0 and seen.reservations == 0, seen

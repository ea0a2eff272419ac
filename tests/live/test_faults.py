"""A cluster of emulated engines that is hurt on purpose: the quick faults, each with its promise.

All faults, and those of vLLM engines, are `./dev faults`.
"""

import asyncio
import os

import pytest

from benchmarks.faults.catalogue import FAULTS, fault_named
from benchmarks.faults.cluster import EMULATED, Family, Target, environment
from benchmarks.faults.storm import open_streams
from benchmarks.faults.traffic import Mix
from benchmarks.faults.trial import try_fault
from tests.live.conftest import serving

pytestmark = [
    pytest.mark.live,
    # Its promises are held to seconds, which a busy machine cannot promise.
    pytest.mark.skipif(
        not os.environ.get("KAPPA_MORE_CLUSTERS"),
        reason="starts a cluster of its own: set KAPPA_MORE_CLUSTERS=1",
    ),
]

MIX = Mix(clients=8, documents=16, words=200)
# The controller last: started anew it may give workers other ranks, and with them other names than
# their engines were told their faults by.
QUICK = (
    "worker_killed", "events_lost", "worker_clock_back", "ingress_clock_forward",
    "controller_killed",
)  # fmt: skip
STREAMS = int(os.environ.get("KAPPA_STREAMS", "200"))


@pytest.fixture(scope="module")
def hurt(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hurt")
    (folder / "home").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(folder).items():
            patch.setenv(name, value)
        with serving(folder, EMULATED) as ready:
            target = Target(ready["url"], ready["model"], Family(ready["pid"]), folder)
            yield target
            target.close()


@pytest.mark.parametrize("name", QUICK)
def test_a_fault_keeps_its_promise(hurt, name):
    turn = [fault.name for fault in FAULTS].index(name)
    found = asyncio.run(try_fault(hurt, fault_named(name), MIX, seed=turn, turn=turn))
    assert found.kept, f"{'; '.join(found.failed)} ({found.to_dict()})"


def test_many_streams_at_once_all_complete(hurt):
    mix = Mix(words=60, max_tokens=20, timeout_s=300.0)
    seen = asyncio.run(open_streams(hurt, STREAMS, mix, seed=0))
    assert seen.failed == 0 and seen.reservations == 0, seen

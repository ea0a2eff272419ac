"""The cluster's accounts: exact, the same wherever they are added up, and never falling."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kappa.protocol import Charge, TenantCharge
from kappa_router.live.charges import Charges, credits_s

TENANTS, WORKERS = ("a", "b", "c", "d"), ("w0", "w1", "w2")


def of(**seconds):
    """Charges of tenants, of each resource as many seconds as told."""
    return tuple(TenantCharge(tenant, s, s, s) for tenant, s in seconds.items())


def gpu(charges):
    return {tenant: charge.gpu_s for tenant, charge in charges.items()}


def test_worker_is_sent_what_all_others_charged():
    charges = Charges()
    charges.report("w0", of(a=1.0, b=2.0), 1.0)
    charges.report("w1", of(a=10.0), 1.0)
    charges.report("w2", of(c=5.0), 1.0)
    assert gpu(charges.elsewhere("w0")) == {"a": 10.0, "c": 5.0}
    assert gpu(charges.elsewhere("w1")) == {"a": 1.0, "b": 2.0, "c": 5.0}
    assert gpu(charges.elsewhere("new")) == {"a": 11.0, "b": 2.0, "c": 5.0}
    assert gpu(charges.totals()) == {"a": 11.0, "b": 2.0, "c": 5.0}


def test_counters_are_cumulative_and_absent_ones_unchanged():
    charges = Charges()
    assert gpu(charges.report("w0", of(a=1.0, b=2.0), 1.0)) == {"a": 1.0, "b": 2.0}
    assert gpu(charges.report("w0", of(a=1.5), 2.0)) == {"a": 0.5}
    assert charges.report("w0", (), 3.0) == {}
    assert gpu(charges.totals()) == {"a": 1.5, "b": 2.0}


def test_resources_are_kept_apart():
    charges = Charges()
    charges.report("w0", (TenantCharge("a", 1.0, 2.0, 3.0),), 1.0)
    assert charges.elsewhere("w1") == {"a": Charge(1.0, 2.0, 3.0)}


def test_late_and_repeated_reports_change_nothing():
    charges = Charges()
    first, second = of(a=1.0), of(a=4.0, b=1.0)
    charges.report("w0", first, 1.0)
    charges.report("w0", second, 2.0)
    for again, time_s in ((second, 2.0), (first, 1.0), (of(a=3.0), 1.5)):
        assert charges.report("w0", again, time_s) == {}
    assert gpu(charges.totals()) == {"a": 4.0, "b": 1.0}


@pytest.mark.parametrize(
    ("again", "steps"), [(of(a=0.5), 900), (of(a=6.0), 3)], ids=["charges fell", "steps fell"]
)
def test_restarted_worker_keeps_what_its_dead_life_charged(again, steps):
    charges = Charges()
    charges.report("w0", of(a=5.0, b=2.0), 1.0, steps_total=500)
    charges.report("w0", again, 2.0, steps_total=steps)
    total = 5.0 + again[0].gpu_s
    assert gpu(charges.totals()) == {"a": total, "b": 2.0}
    # Its new engine knows nothing of the old one's charges: they count as another's.
    assert gpu(charges.elsewhere("w0")) == {"a": 5.0, "b": 2.0}
    charges.report("w0", of(b=1.0), 3.0, steps_total=steps + 1)
    assert gpu(charges.totals()) == {"a": total, "b": 3.0}


def test_worker_that_left_stays_charged_and_may_come_back():
    charges = Charges()
    charges.report("w0", of(a=5.0), 1.0)
    charges.left("w0")
    charges.left("never seen")
    assert gpu(charges.elsewhere("w1")) == {"a": 5.0}
    charges.report("w0", of(a=6.0), 2.0)
    assert gpu(charges.totals()) == {"a": 6.0}


def test_workers_that_come_and_go_for_ever_take_no_more_room():
    charges = Charges()
    for i in range(500):
        charges.report(f"w{i}", of(a=1.0), float(i))
        charges.left(f"w{i}")
    assert gpu(charges.totals()) == {"a": 500.0}
    assert len(charges._workers) + len(charges._gone) < 100


def test_tenants_beyond_the_bound_go_least_active_first():
    charges = Charges(max_tenants=2)
    charges.report("w0", of(a=1.0, b=2.0), 1.0)
    charges.report("w0", of(a=1.5), 2.0)
    charges.report("w1", of(c=4.0), 3.0)
    assert gpu(charges.totals()) == {"a": 1.5, "c": 4.0}
    charges.report("w1", of(b=1.0), 4.0)
    assert gpu(charges.totals()) == {"b": 1.0, "c": 4.0}


def test_elsewhere_sends_the_64_most_recent_tenants():
    charges = Charges()
    for i in range(100):
        charges.report("w0", of(**{f"t{i:02}": 1.0}), float(i))
    told = charges.elsewhere("w1")
    assert list(told) == [f"t{i:02}" for i in range(99, 35, -1)]
    assert list(charges.elsewhere("w1", limit=2)) == ["t99", "t98"]


def test_tenant_below_the_weighted_mean_is_behind():
    charged = {"a": Charge(1.0, 6.0, 0.0), "b": Charge(2.0, 0.0, 1.0), "idle": Charge()}
    assert credits_s(charged, {}) == {"a": -2.0, "b": 2.0}
    assert credits_s(charged, {"a": 3.0}) == {"a": 0.0, "b": 0.0}
    assert credits_s({}, {}) == {}


@given(st.dictionaries(st.text(), st.floats(0, 1e6), max_size=20))
def test_credits_add_up_to_zero(seconds):
    charged = {tenant: Charge(0.0, s, 0.0) for tenant, s in seconds.items()}
    assert sum(credits_s(charged, {}).values()) == pytest.approx(0.0, abs=1e-3)


def history(rng, reports):
    """What workers say: (worker, charges, time_s, steps), in order of each worker; some restart.

    Every first report of a life is near zero, as a real one is, and every last one is complete.
    """
    said, truth = [], dict.fromkeys(TENANTS, 0.0)
    for worker in WORKERS:
        time_s = 0.0
        for _life in range(rng.randint(1, 3)):
            now, steps = dict.fromkeys(TENANTS, 0.0), 0
            for i in range(reports):
                changed = rng.sample(TENANTS, rng.randint(0, 4)) if i < reports - 1 else TENANTS
                for tenant in changed if i else ():
                    now[tenant] += rng.random() * 3
                time_s, steps = (
                    time_s + rng.random() + 0.01,
                    steps + rng.randint(i > 0, 9 * (i > 0)),
                )
                told = {tenant: now[tenant] for tenant in changed}
                said.append((worker, of(**told), time_s, steps))
            for tenant in TENANTS:
                truth[tenant] += now[tenant]
    return said, truth


def hearing(rng, said):
    """The same reports as one of several listeners hears them: workers interleaved, some again."""
    queues = {w: [report for report in said if report[0] == w] for w in WORKERS}
    heard = []
    while any(queues.values()):
        worker = rng.choice([w for w in WORKERS if queues[w]])
        heard.append(queues[worker].pop(0))
        if rng.random() < 0.3:
            heard.append(rng.choice([report for report in heard if report[0] == worker]))
    return heard


def falls(before, now):
    return any(
        later < earlier
        for tenant, charge in before.items()
        for earlier, later in zip(charge, now.get(tenant, Charge()), strict=True)
    )


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), reports=st.integers(2, 8))
def test_listeners_agree_once_both_heard_all_and_never_fall(seed, reports):
    rng = random.Random(seed)
    said, truth = history(rng, reports)
    first, second = Charges(), Charges()
    for listener in (first, second):
        told = {worker: {} for worker in WORKERS}
        for report in hearing(rng, said):
            listener.report(*report)
            for worker in WORKERS:
                now = listener.elsewhere(worker)
                assert not falls(told[worker], now)
                told[worker] = now
    assert first.totals() == second.totals()
    for worker in WORKERS:
        assert first.elsewhere(worker) == second.elsewhere(worker)
    for tenant, charge in first.totals().items():
        assert charge == pytest.approx((truth[tenant],) * 3)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), at=st.floats(0.0, 1.0))
def test_listener_lacks_exactly_what_it_has_not_received(seed, at):
    rng = random.Random(seed)
    said, _ = history(rng, 6)
    ahead, behind = Charges(), Charges()
    heard = hearing(rng, said)
    missing = heard[int(at * len(heard)) :]
    for report in heard:
        ahead.report(*report)
    for report in heard[: len(heard) - len(missing)]:
        behind.report(*report)
    before, missed = behind.totals(), dict.fromkeys(TENANTS, 0.0)
    for report in missing:
        for tenant, charge in behind.report(*report).items():
            missed[tenant] += charge.gpu_s
    for tenant, charge in ahead.totals().items():
        short_s = charge.gpu_s - before.get(tenant, Charge()).gpu_s
        assert short_s == pytest.approx(missed[tenant], abs=1e-6)
        assert short_s >= 0
    assert ahead.totals() == behind.totals()

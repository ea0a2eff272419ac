"""How tenants stand: credits by weight that add up to nothing, and who waits longest."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kappa.protocol import Charge
from router.live.fairness import credits_s, oldest_waits_s
from router.live.records import DecisionRecord


def test_who_had_less_than_the_mean_by_weight_is_behind():
    charged = {"a": Charge(1.0, 6.0, 0.0), "b": Charge(2.0, 0.0, 1.0), "idle": Charge()}
    assert credits_s(charged, {}) == {"a": -2.0, "b": 2.0}
    assert credits_s(charged, {"a": 3.0}) == {"a": 0.0, "b": 0.0}
    assert credits_s({}, {}) == {}


@given(st.dictionaries(st.text(), st.floats(0, 1e6), max_size=20))
def test_credits_add_up_to_nothing(seconds):
    charged = {tenant: Charge(0.0, s, 0.0) for tenant, s in seconds.items()}
    assert sum(credits_s(charged, {}).values()) == pytest.approx(0.0, abs=1e-3)


def record(tenant, time_s, **changes):
    return DecisionRecord(SimpleNamespace(), time_s, 0.0, tenant, **changes)


def test_the_oldest_that_no_engine_has_admitted_counts():
    records = [
        record("a", 5.0), record("a", 8.0), record("b", 1.0, admitted=SimpleNamespace()),
        record("b", 2.0, ttft_s=0.1), record("b", 3.0, end="done"), record("c", 99.0),
    ]  # fmt: skip
    assert oldest_waits_s(records, 10.0) == {"a": 5.0, "c": 0.0}

"""Rules by name."""

import pytest

from kappa_scheduler.catalogue import SCHEDULERS, packs, rule_named
from kappa_scheduler.config import FairConfig, LinkRates


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_name_gives_a_fresh_rule_of_that_name(name):
    one = rule_named(name, FairConfig(), LinkRates(1e-6))
    other = rule_named(name)
    assert one.name == other.name == name and one is not other
    assert len(one) == 0 and one.max_skips == 0 and one.max_wait_s == 0.0


def test_an_unknown_name_is_refused_with_those_there_are():
    known = "fair, fcfs, budget_2048, budget_512, cap1, dlpm, equinox, greedy"
    with pytest.raises(ValueError, match=f"'lifo': choose one of {known}"):
        rule_named("lifo")


def test_rules_that_go_on_past_a_misfit_say_so():
    assert {name for name in SCHEDULERS if packs(name)} == {"fair", "cap1", "greedy"}
    assert not packs("stock")

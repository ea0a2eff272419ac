"""What a decider sent with a request, and what of it counts as not sent."""

import json
import math

import pytest

from kappa.protocol import CHARGES_KEY, WEIGHT_KEY, Charge
from kappa_workers.request_metadata import charges_of


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf, 10**400, "2", None])
def test_weights_and_charges_that_make_no_sense_are_not_taken(weight):
    wrong = {"inf": [math.inf, 0, 1], "nan": [math.nan, 0, 1], "below": [-1, 0, 0]}
    sent = json.dumps({"a": [1.0, 2.0, 3.0], **wrong})
    told = {WEIGHT_KEY: weight, CHARGES_KEY: sent}
    assert charges_of(told, "a") == ({"a": Charge(1.0, 2.0, 3.0)}, {})


@pytest.mark.parametrize("sent", ["", "no JSON", "[1]", '{"a": 1}', "[" * 100_000])
def test_charges_that_cannot_be_read_cost_no_weight(sent):
    assert charges_of({WEIGHT_KEY: 2, CHARGES_KEY: sent}, "a") == ({}, {"a": 2.0})

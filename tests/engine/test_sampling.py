"""Draws follow the probabilities, stay within the nucleus, and do not depend on their batch."""

import numpy as np
import pytest
import torch

from kappa_engine.sampling import GREEDY, Sampling, sample


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_greedy_takes_the_likeliest_and_draws_nothing() -> None:
    dice = rng()
    before = dice.bit_generator.state
    assert sample(torch.tensor([[1.0, 3.0, 2.0], [5.0, 0.0, 0.0]]), [GREEDY] * 2, [dice] * 2) == [
        1,
        0,
    ]
    assert dice.bit_generator.state == before


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_frequencies_are_the_probabilities_of_the_nucleus(dtype: torch.dtype) -> None:
    probabilities = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64)
    logits = (probabilities.log() / 2).to(dtype).expand(4000, -1)
    dice = rng(1)
    drawn = sample(logits, [Sampling(temperature=0.5, top_p=0.85)] * 4000, [dice] * 4000)
    counts = np.bincount(drawn, minlength=4)
    assert counts[0] == 0
    np.testing.assert_allclose(counts / 4000, [0, 0.444, 0.222, 0.333], atol=0.03)


def test_a_row_draws_the_same_in_any_company() -> None:
    logits = torch.from_numpy(rng(2).normal(size=(5, 50)))
    drawn = Sampling(temperature=1.5, top_p=0.95)
    alone = [sample(logits[i : i + 1], [drawn], [rng(i)])[0] for i in range(5)]
    mixed = sample(logits, [drawn, GREEDY, drawn, drawn, drawn], [rng(i) for i in range(5)])
    assert [mixed[i] for i in (0, 2, 3, 4)] == [alone[i] for i in (0, 2, 3, 4)]
    assert mixed[1] == int(logits[1].argmax())


def test_a_tiny_nucleus_is_the_likeliest_token() -> None:
    logits = torch.from_numpy(rng(3).normal(size=(20, 30)))
    drawn = [Sampling(temperature=2.0, top_p=1e-9)] * 20
    assert sample(logits, drawn, [rng(4)] * 20) == logits.argmax(-1).tolist()


def test_logits_that_are_no_numbers_do_not_end_the_others() -> None:
    logits = torch.tensor([[0.0, 9.0], [torch.nan, torch.nan]])
    drawn = sample(logits, [GREEDY, Sampling(temperature=1.0)], [rng(0), rng(1)])
    assert drawn[0] == 1 and drawn[1] in (0, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
    ],
)
def test_what_makes_no_sense_is_refused(options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**options)


@pytest.mark.parametrize("temperature", [1e-6, 1e-40, 5e-324])
def test_next_to_no_temperature_is_greedy(temperature: float) -> None:
    logits = torch.from_numpy(rng(3).normal(scale=20, size=(50, 30)))
    drawn = sample(logits, [Sampling(temperature=temperature)] * 50, [rng(i) for i in range(50)])
    assert drawn == logits.argmax(-1).tolist()

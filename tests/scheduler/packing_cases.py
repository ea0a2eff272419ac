"""Random iterations to pack, and their exact optimum."""

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

BLOCK_TOKENS = 32


def instance(rng, resources=1, requests=24):
    """Tokens, sizes, budget and room of an iteration that cannot take all.

    Requests (2 to `requests`) have 1 to 300 new tokens and, every other, up to 1,100 cached ones,
    log-uniform. Resources: blocks; then seconds of link; then blocks of those of high ratio only.
    """
    n = int(rng.integers(2, requests))
    tokens = rng.integers(1, 300, n).astype(np.float64)
    cached = np.exp(rng.uniform(0, 7, n)) * rng.integers(0, 2, n)
    blocks = np.ceil((tokens + cached) / BLOCK_TOKENS)
    high = np.where(cached > 2 * tokens, blocks, 0.0)
    columns = [blocks, cached * 0.001 + 0.02, high, np.ones(n)][:resources]
    room = [max(column.max(), np.floor(rng.uniform(0.2, 1.0) * column.sum())) for column in columns]
    budget = float(np.floor(rng.uniform(0.2, 1.0) * tokens.sum())) + 1.0
    return tokens, np.stack(columns, axis=1), budget, np.array(room)


def optimum(tokens, sizes, budget, room):
    """Most tokens within the budget that any choice computes, by integer programming."""
    n = len(tokens)
    # Variables: take it or not; and the tokens filled, at most the budget and the tokens taken.
    rows = np.vstack([np.append(-tokens, 1.0), np.c_[sizes.T, np.zeros(len(room))]])
    found = milp(
        np.append(np.zeros(n), -1.0),
        constraints=LinearConstraint(rows, -np.inf, np.append(0.0, room)),
        integrality=np.append(np.ones(n), 0.0),
        bounds=Bounds(0, np.append(np.ones(n), budget)),
    )
    assert found.x is not None, found.message
    return float(-found.fun)

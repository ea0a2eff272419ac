"""Small made-up workloads and clusters, shared by the simulator's tests."""

import pytest

from kappa.shapes import model_shape
from kappa_simulator.clusters import KINDS, SimulatedCluster, numbered
from kappa_workload.shapes import SessionShape, Workload, key_of, stream_ids, turn_of

BLOCK = 64


def document_session(name, document_blocks, questions, think_s=5.0):
    """Every turn: the document, then a question of its own."""
    turns = []
    for number in range(questions):
        stop = document_blocks + 4
        ids = stream_ids(key_of(name), 0, stop).copy()
        ids[document_blocks:] = stream_ids(key_of(name, number), document_blocks, stop)
        turns.append(turn_of(think_s if number else 0.0, document_blocks * BLOCK + 100, 20, ids,
                             BLOCK))  # fmt: skip
    return SessionShape(name, tuple(turns))


def chat_session(name, turns, tenant=""):
    """Every turn goes on from the one before."""
    ids = stream_ids(key_of(name), 0, 20 * turns)
    return SessionShape(
        name,
        tuple(turn_of(3.0 if n else 0.0, 300 + 500 * n, 60, ids, BLOCK) for n in range(turns)),
        tenant,
    )


@pytest.fixture(scope="session")
def documents():
    sessions = tuple(document_session(f"d{i}", 100 + 40 * i, 5) for i in range(12))
    return Workload("documents", BLOCK, sessions, "made up")


@pytest.fixture(scope="session")
def chats():
    sessions = tuple(chat_session(f"c{i}", 1 + i % 6) for i in range(20))
    return Workload("chats", BLOCK, sessions, "made up")


@pytest.fixture(scope="session")
def shape():
    return model_shape("llama-3.1-8b")


@pytest.fixture(scope="session")
def trio():
    nodes = [numbered(KINDS[kind], 1)[0] for kind in ("gh200", "h100", "a100")]
    return SimulatedCluster("trio", tuple(nodes))

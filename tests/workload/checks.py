"""What tests of several workloads do alike: documents made up, caches in fact, pauses, refusals."""

import hashlib

import numpy as np
import pytest

from kappa_workload.reading import ReadAs, WorkloadError
from kappa_workload.shapes import SessionShape, key_of, stream_ids, turn_of


def document_session(tokens, questions, size):
    """A reader who asks questions of these lengths on one document, in blocks of `size` tokens."""
    shared = stream_ids(key_of("document"), 0, tokens // size)
    turns = []
    for number, question in enumerate(questions):
        ids = np.concatenate([shared, stream_ids(key_of("question", number), len(shared), 20)])
        turns.append(turn_of(0.0, tokens + question, 4, ids, size, question))
    return SessionShape("d/0", tuple(turns), document_tokens=tokens)


def cached_in_fact(seen, tokens, size):
    """Tokens of a prompt that an endless cache of full blocks held; notes the prompt."""
    state, held, whole = hashlib.blake2b(digest_size=8), 0, True
    for start in range(0, len(tokens) // size * size, size):
        state.update(tokens[start : start + size].tobytes())
        digest = state.copy().digest()
        whole = whole and digest in seen
        held += size * whole
        seen.add(digest)
    return min(held, (len(tokens) - 1) // size * size)


def check_pauses(read, path, mean_s):
    """Pauses before later turns are drawn from the seed, with this mean; first turns have none."""

    def pauses(seed):
        sessions = read(path, how=ReadAs(seed=seed)).sessions
        assert all(session.turns[0].after_s == 0 for session in sessions)
        return [turn.after_s for session in sessions for turn in session.turns[1:]]

    assert pauses(1) == pauses(1) != pauses(2)
    assert np.mean(pauses(1)) == pytest.approx(mean_s, rel=0.1)


def check_refused(read, path, place, reason):
    """Reading is refused with the file, the place in it (": row 2: ") and the reason."""
    with pytest.raises(WorkloadError) as error:
        read(path)
    message = str(error.value)
    assert message.startswith(f"{path}{place}") and reason in message, message

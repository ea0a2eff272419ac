"""Copies of slots that fail or are slow: who pays, what waits for what, what goes on running."""

import time

import pytest
import torch

from kappa.plans.clo import CloConfig, SparseSettings
from kappa_engine.sparse.gather_kernel import Gather
from kappa_engine.transfer import TransferFailed
from tests.engine.engines import engine, finish, generate_in_host, link_of, submit
from tests.engine.engines import prompt as tokens_of
from tests.engine.rig import prompt, rig
from tests.engine.sparse.sparse_decoder import SparseDecoder

WHOLE = CloConfig(share=1.0, sink_tokens=4, recent_tokens=8, code_bits=64)


def slots(**changes):
    values = {"slots": 2, "max_tokens": 160, "chunk_tokens": 8, **changes}
    return SparseSettings(WHOLE, **values)


def test_block_that_does_not_arrive_fails_only_its_own_slot():
    with rig("llama", blocks=200) as r:
        decoder = SparseDecoder(r.forward, slots())
        decoder.prefill([prompt(31), prompt(18)])
        copy = r.mover._copy

        def broken(direction, copies):
            if direction == "d2h":
                raise OSError("the link is down")
            copy(direction, copies)

        r.mover._copy = broken
        decoder.step()
        r.mover.drain()
        r.mover._copy = copy
        states = decoder.slots.states
        # Of the first slot a block has left, of the other none.
        assert [(s.tokens, s.host_tokens) for s in states[:2]] == [(32, 24), (19, 8)]
        token = torch.tensor([[5]])
        for _ in range(2):
            decoder.sparse.run([1], token, decoder.take_block)
        assert states[1].tokens == 21 and not states[1].stuck and states[0].stuck
        with pytest.raises(TransferFailed, match="recent are not in host memory"):
            decoder.sparse.run([0], token, decoder.take_block)
        decoder.close()


@pytest.mark.parametrize("retriever", ["hash", "oracle"])
def test_no_gather_begins_before_it_is_known_which_rows_it_takes(retriever):
    with engine(sparse=slots(retriever=retriever)) as made:
        generate_in_host(made, tokens_of(48, 1), count=1)
        start, gathers = made.mover._start, []

        def noted(direction, copies, after):
            gathers.extend(after for target, _ in copies if isinstance(target, Gather))
            return start(direction, copies, after)

        made.mover._start = noted
        asked = tokens_of(48, 1) + tokens_of(13, 2)
        submit(made, asked, 9, approx=True, planner="sparse")
        finish(made)
        assert len(gathers) > 10 and None not in gathers


def test_a_pass_that_failed_leaves_nothing_under_way():
    with engine(sparse=slots()) as made:
        link = link_of(made)
        request = submit(made, tokens_of(41, 1), 40, approx=True)
        while request.slot is None:
            made.step()
            made.store.drain(20)
        tried = []

        def slow_behind_a_failure(direction, copies):
            if direction == "h2d":
                tried.append(direction)
                if len(tried) > 1:
                    time.sleep(0.3)
            return len(tried) == 1 and direction == "h2d"

        link.breaks = slow_behind_a_failure
        while request.slot is not None:
            made.step()
        assert len(tried) == 2 and made.mover._newest["h2d"].done()
        finish(made)


def test_a_slot_that_failed_in_a_pass_says_so():
    with rig("llama", blocks=200) as r:
        decoder = SparseDecoder(r.forward, slots())
        decoder.prefill([prompt(31)])
        copy = r.mover._copy
        r.mover._copy = lambda direction, copies: 1 / 0 if direction == "d2h" else None
        decoder.step()
        r.mover.drain()
        r.mover._copy = copy
        with pytest.raises(TransferFailed, match="recent are not in host memory"):
            decoder.step()
        decoder.close()

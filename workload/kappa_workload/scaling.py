"""A workload made small: every length shrinks by one factor, so that ratios and sharing stay.

For models with short contexts and clusters on a laptop: documents of 57,000 tokens become some of
1,800 with the same questions in order. Only lengths shrink: texts are given up, pauses stay.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from kappa_workload.prompts import prompt_ids
from kappa_workload.shapes import SessionShape, TurnShape, Workload, turn_of


def scaled(workload: Workload, factor: float | Fraction) -> Workload:
    """The workload with prompts, documents, outputs and blocks of `factor` times their tokens.

    Lengths are rounded down, to one token at least: a question that vanishes keeps one.

    Raises:
        ValueError: the factor is not above 0 and at most 1, or leaves no whole number of tokens a
            block.
    """
    exact = Fraction(factor).limit_denominator(1 << 16)
    if not 0 < exact <= 1:
        raise ValueError(f"scale {factor} is not above 0 and at most 1")
    block_tokens = workload.block_tokens * exact
    if block_tokens.denominator != 1:
        raise ValueError(
            f"scale {factor}: blocks of {workload.block_tokens} tokens cannot shrink to "
            f"{float(block_tokens):g}: choose a power of two such as 1/{workload.block_tokens}, or "
            "more"
        )
    if exact == 1:
        return workload
    sessions = tuple(
        _scaled_session(session, exact, int(block_tokens)) for session in workload.sessions
    )
    notes = (*workload.notes, f"every length times {exact}")
    return replace(
        workload, block_tokens=int(block_tokens), sessions=sessions, notes=notes, texts=None
    )


def _scaled_session(session: SessionShape, factor: Fraction, block_tokens: int) -> SessionShape:
    document_tokens = int(session.document_tokens * factor)
    turns = tuple(
        _scaled_turn(session, number, factor, block_tokens, document_tokens)
        for number in range(len(session.turns))
    )
    return replace(session, turns=turns, document_tokens=document_tokens)


def _scaled_turn(
    session: SessionShape, number: int, factor: Fraction, block_tokens: int, document_tokens: int
) -> TurnShape:
    turn = session.turns[number]
    input_tokens = max(int(turn.input_tokens * factor), document_tokens + 1)
    output_tokens = int(turn.output_tokens * factor)
    ids = prompt_ids(session, number)
    if len(turn.kept_blocks) > len(ids):
        ids = turn.kept_blocks
    new_tokens = turn.new_tokens
    if new_tokens is not None:
        before = int((turn.input_tokens - new_tokens) * factor)
        new_tokens = max(input_tokens - before, 0 if not turn.new_tokens else 1)
    return turn_of(turn.after_s, input_tokens, output_tokens, ids, block_tokens, new_tokens)

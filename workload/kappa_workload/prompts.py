"""Prompts for workloads that have only lengths: token ids, or plain words, made from block ids.

Equal block ids become equal tokens, so prompts share exactly the prefixes that the source shares;
ids that differ become tokens that differ. `workload.replay` asks here, prompt by prompt. The words
are for endpoints that take no token ids: nearly every tokenizer has each of them as one token.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from kappa_workload.shapes import BlockIds, SessionShape, TurnShape, key_of, mixed

TokenIds = NDArray[np.int32]

VOCABULARY = range(100, 3600)
"""Token ids that prompts are made of: above the special ones, and in every model's vocabulary (the
tiny test model's is hardly larger)."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_REST = np.uint64(0xD6E8FEB86659FD93)  # marks the end of a document, behind its last full block

_TEXT = """
the of and to in is that it was for on are as with his they at be this from have or by one had not
but what all were when we there can an your which their said if do will each about how up out them
then she many some so these would other into has more her two like him see time could no make than
first been its who now people my made over did down only way find use may water long little very
after words called just where most know get through back much go good new write our me man too any
day same right look think also around another came come work three word must because does part even
place well such here take why things help put years different away again off went old number great
tell men say small every found still between name should home big give air line set own under read
last never us left end along while might next sound below saw something thought both few those
always looked show large often together asked house world going want school important until form
food keep children feet land side without boy once animals life enough took four head above kind
began almost live page got earth need far hand high year mother light parts country father let
night following picture being study second eyes soon times story boys since white days ever paper
hard near sentence better best across during today others however sure means knew try told young
miles sun ways thing whole hear example heard several change answer room sea against top turned
learn point city play toward five using himself usually
"""

WORDS = tuple(_TEXT.split())
"""Frequent English words, no two alike."""

_WORDS = np.array(WORDS, dtype=object)


def block_tokens_of(ids: BlockIds, block_tokens: int, salt: int, span: range) -> NDArray[np.int64]:
    """Tokens of blocks, shape (blocks, block_tokens), all in `span`: a function of id, place and
    salt alone."""
    places = np.arange(1, block_tokens + 1, dtype=np.uint64) * _GOLDEN
    scrambled = mixed(mixed(ids ^ np.uint64(salt))[:, None] + places[None, :])
    return (scrambled % np.uint64(len(span))).astype(np.int64) + span.start


def prompt_tokens(
    session: SessionShape, turn: int, block_tokens: int, *, salt: int = 0, span: range = VOCABULARY
) -> TokenIds:
    """The prompt of one turn as `input_tokens` token ids, shape (input_tokens,).

    Tokens behind the last full block follow the source where it gives them: a prompt that a later
    one repeats ends as that one goes on, and a document is shared to its last token.

    block_tokens: of the workload that the session is from. salt: runs of different salts share no
    tokens. span: which token ids may occur.
    """
    ids = prompt_ids(session, turn)
    tokens = block_tokens_of(ids, block_tokens, salt, span).reshape(-1)
    whole, rest = divmod(session.document_tokens, block_tokens)
    if whole and rest:
        last = mixed(ids[whole - 1 : whole] ^ _REST)
        start = whole * block_tokens
        tokens[start : start + rest] = block_tokens_of(last, block_tokens, salt, span)[0, :rest]
    return tokens[: session.turns[turn].input_tokens].astype(np.int32)


def prompt_words(session: SessionShape, turn: int, block_tokens: int, *, salt: int = 0) -> str:
    """The prompt of one turn as text: one plain word for each token."""
    words = prompt_tokens(session, turn, block_tokens, salt=salt, span=range(len(WORDS)))
    return " ".join(_WORDS[words].tolist())


@lru_cache(maxsize=16)
def filler(name: str, words: int) -> str:
    """Neutral text of `words` plain words, always the same for a name."""
    if words < 1:
        return ""
    blocks = -(-words // 256)
    ids = mixed(key_of("filler", name) + np.arange(blocks, dtype=np.uint64))
    numbers = block_tokens_of(ids, 256, 0, range(len(WORDS))).reshape(-1)[:words]
    return " ".join(_WORDS[numbers].tolist())


def prompt_ids(session: SessionShape, turn: int) -> BlockIds:
    """Ids of a prompt's blocks, and of the one behind them that it may fill in part."""
    shape = session.turns[turn]
    full = len(shape.blocks)
    if len(shape.kept_blocks) > full:
        return shape.kept_blocks[: full + 1]
    for later in session.turns[turn + 1 :]:
        if not _extends(later, shape):
            break
        if len(later.kept_blocks) > full:
            return later.kept_blocks[: full + 1]
    # A copy has ids of its own, and so must the block beyond them.
    own = mixed(np.array([key_of("rest of a prompt", session.id, turn)], dtype=np.uint64))
    return np.concatenate([shape.blocks, own])


def _extends(later: TurnShape, shape: TurnShape) -> bool:
    """Whether a later prompt repeats an earlier one to its last token, by its source."""
    if later.new_tokens is None:
        return False
    return later.input_tokens - later.new_tokens >= shape.input_tokens

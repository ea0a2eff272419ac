"""What the bench and its helpers say to each other."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.routing.peers import wire
from benchmarks.routing.peers.wire import block_tokens, blocks_in, prompt_text, prompt_tokens

BLOCKS = [0xFFFF_FFFF_FFFF_FFFF, 1, 0x0123_4567_89AB_CDEF]


def test_blocks_survive_the_way_through_text():
    assert blocks_in(prompt_text(BLOCKS, "s#1")) == BLOCKS
    assert blocks_in(prompt_text([], "s#1")) == []


def test_prompts_share_as_much_text_as_they_share_blocks():
    one, other = prompt_text([*BLOCKS, 7], "a"), prompt_text([*BLOCKS, 8], "b")
    shared = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    assert len(BLOCKS) * wire.CHARACTERS_PER_BLOCK <= shared
    assert shared < (len(BLOCKS) + 1) * wire.CHARACTERS_PER_BLOCK


@pytest.mark.parametrize("text", ["hello world", "xyz ?1"])
def test_another_prompt_is_refused(text):
    with pytest.raises(ValueError):
        blocks_in(text)


@pytest.mark.parametrize("size", [1, 3, 16, 64])
def test_a_block_has_its_tokens_and_no_more(size):
    tokens = block_tokens(BLOCKS[2], size)
    assert len(tokens) == size
    assert all(0 <= token < 1 << 16 for token in tokens)


def test_a_prompts_tokens_are_those_of_its_blocks_and_a_rest():
    tokens = prompt_tokens(BLOCKS, 16, 3 * 16 + 5)
    assert len(tokens) == 3 * 16 + 5
    assert tokens[16:32] == block_tokens(BLOCKS[1], 16)


def test_different_blocks_have_different_tokens():
    assert len({tuple(block_tokens(b, 16)) for b in BLOCKS}) == len(BLOCKS)


def test_a_peers_interpreter_can_import_it_alone():
    """It is imported by path where nothing of ours is installed."""
    program = (
        f"import sys; sys.path.append({str(Path(wire.__file__).parent)!r}); import wire; "
        "print(wire.__name__, *sorted(m for m in sys.modules if m.startswith(('loadtest', "
        "'numpy'))))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["wire"]

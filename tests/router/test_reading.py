"""Which bodies are read on the event loop, and which on a thread."""

import gc
import threading

import pytest

from kappa_router.api.reading import INLINE_BYTES, INLINE_CONTAINERS, prepare, read

HERE, THREAD = "MainThread", "bodies"


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (b"", HERE), (b"x" * INLINE_BYTES, HERE), (b"x" * (INLINE_BYTES + 1), THREAD),
        (b"[{" * (INLINE_CONTAINERS // 2), HERE), (b"[{" * INLINE_CONTAINERS, THREAD),
    ],
    ids=["empty", "small", "large", "few brackets", "many brackets"],
)  # fmt: skip
async def test_large_body_or_many_brackets_go_to_a_thread(body, where):
    made = await read(body, lambda given: (given, threading.current_thread().name))
    assert made[0] is body and made[1].startswith(where)


@pytest.mark.parametrize("size", [1, INLINE_BYTES + 1])
async def test_read_raises_what_making_raises(size):
    with pytest.raises(ZeroDivisionError):
        await read(b"x" * size, lambda body: 1 // 0)


def test_prepare_leaves_what_there_is_to_no_later_collection():
    try:
        prepare()
        assert gc.get_freeze_count() > 1000
    finally:
        gc.unfreeze()

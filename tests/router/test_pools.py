"""A pool's handle is asked, and told to stop when nobody listens any more."""

import pytest

from router.api.endpoints import PoolHandles


class Answer:
    """Ray's generator of a streamed answer, as far as it is used."""

    def __init__(self, items, error=None):
        self.items, self.error, self.cancelled = list(items), error, 0

    def __aiter__(self):
        return self

    async def __anext__(self):
        if self.items:
            return self.items.pop(0)
        raise self.error or StopAsyncIteration

    def cancel(self):
        self.cancelled += 1


class Handle:
    """A handle whose every method gives one answer."""

    def __init__(self, answer):
        self.answer, self.asked = answer, []

    def options(self, *, stream):
        assert stream
        return self

    @property
    def completions(self):
        return self

    def remote(self, body, info):
        self.asked.append(body)
        return self.answer


def streamed(answer, pool="a"):
    handle = Handle(answer)
    return handle, PoolHandles({"a": handle}).stream(pool, {"x": 1}, "completions", {})


async def test_what_is_answered_is_passed_on_and_not_stopped():
    handle, stream = streamed(answer := Answer([1, 2]))
    assert [item async for item in stream] == [1, 2]
    assert handle.asked == [{"x": 1}] and answer.cancelled == 0


async def test_a_pool_that_is_not_known_is_any():
    _, stream = streamed(Answer([1]), pool="gone")
    assert [item async for item in stream] == [1]


async def test_one_that_is_left_between_two_items_is_told_to_stop():
    _, stream = streamed(answer := Answer([1, 2]))
    assert await anext(stream) == 1
    await stream.aclose()
    assert answer.cancelled == 1


async def test_one_that_fails_is_told_to_stop():
    _, stream = streamed(answer := Answer([1], RuntimeError("lost")))
    with pytest.raises(RuntimeError, match="lost"):
        _ = [item async for item in stream]
    assert answer.cancelled == 1


def test_without_pools_there_is_nothing_to_serve():
    with pytest.raises(ValueError, match="no pool"):
        PoolHandles({})

"""A body that comes in parts, and goes on in one."""

import pytest

from kappa.asgi import body_of, replayed

GONE = {"type": "http.disconnect"}


def receiving(*parts):
    left = [
        {"type": "http.request", "body": part, "more_body": i < len(parts)}
        for i, part in enumerate(parts, 1)
    ] + [GONE]

    async def receive():
        return left.pop(0)

    return receive


async def test_body_is_whole_up_to_its_bound():
    assert await body_of(receiving(b"ab", b"c"), 3, ValueError("more")) == b"abc"
    with pytest.raises(ValueError, match="more"):
        await body_of(receiving(b"ab", b"cd"), 3, ValueError("more"))


async def test_body_is_none_when_the_client_leaves():
    assert await body_of(receiving(), 3, ValueError("more")) is None


async def test_replayed_gives_the_body_once_and_then_what_comes():
    receive = replayed(b"abc", receiving())
    assert (await receive())["body"] == b"abc" and await receive() == GONE

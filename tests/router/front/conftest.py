"""`kappa route` over fake servers, spoken to over real sockets."""

import contextlib
from functools import partial
from types import SimpleNamespace
from unittest import mock

import aiohttp

from kappa.settings.front import load_front_settings
from kappa_router.front import gateway
from tests.router.envoys import lent
from tests.router.front.offering import serving
from tests.router.patience import until

QUICK = {"every_s": 0.05, "timeout_s": 30.0}


@contextlib.asynccontextmanager
async def routing(*servers, ready=True, **sections):
    """`kappa route` over the servers: its url, its `front`, a client, and a wait until every
    request has ended."""
    backends = [
        one if isinstance(one, dict) else {"url": one.url, "profile": profile, "name": name}
        for one, profile, name in zip(
            servers, ("h100-pcie5", "gh200-c2c", "a100-pcie4"), "abc", strict=False
        )
    ]
    given = {"probe": QUICK, **sections, "http": {"port": 0}}
    settings = load_front_settings(None, backends=backends, **given)
    async with _opened(settings) as here:
        front = here.front
        if ready:
            count = len(front.backends)  # Ranks count as servers.
            await until(lambda: front.live.choosable == count)
            known = count + bool(front.rollout.balancer)
            await until(lambda: len(here.scene.endpoints) == known)
        async with aiohttp.ClientSession(here.url) as http:
            settled = partial(until, lambda: not front.live.router.flights)
            yield SimpleNamespace(
                url=here.url, front=front, live=front.live, backends=front.backends, http=http,
                settled=settled,
            )  # fmt: skip


@contextlib.asynccontextmanager
async def fronted(*servers, **sections):
    """`kappa route` over servers that it starts: what `routing` yields, and the servers."""
    async with serving(*servers), routing(*servers, **sections) as here:
        yield here, servers


@contextlib.asynccontextmanager
async def _opened(settings):
    """As `opened`, but its Envoy is lent."""
    made, spec_of = [], gateway._spec_of

    async with contextlib.AsyncExitStack() as stack:

        def lent_spec(*given):
            made.append(stack.enter_context(lent(spec_of(*given))))
            return made[0].spec

        with mock.patch.multiple(
            gateway, _spec_of=lent_spec, Gateway=lambda spec: contextlib.nullcontext(made[0])
        ):
            here = await stack.enter_async_context(gateway.opened(settings))
        yield here


async def served(front, text="hello", **fields):
    """A streamed chat through the front: the whole answer, once the front knows its end."""
    body = chat(text, stream=True, **fields)
    answer = await (await front.http.post("/v1/chat/completions", json=body)).read()
    await front.settled()
    return answer


def chat(text="hello", **fields):
    return {"model": "llama-3.1-8b", "messages": [{"role": "user", "content": text}], **fields}

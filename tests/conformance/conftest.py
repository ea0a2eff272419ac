"""A cluster in one process for clients that others wrote: Envoy, decider and two emulated engines
on ports of their own, on an event loop in a thread. Ray Serve's actors are all that is missing."""

import asyncio
import threading
from dataclasses import dataclass

import httpx
import pytest

from kappa_router.api.app import Access
from kappa_router.api.render import PromptRenderer
from kappa_router.gateway.spec import Bounds
from tests.router.cluster.conftest import MODEL as MODEL
from tests.router.cluster.conftest import PortedNode, clustered
from tests.router.front.conftest import routing
from tests.workers.emulation import tiny_model

MAX_BODY_BYTES = 1 << 16
_STARTS_S, _PATIENCE_S = 240.0, 30.0


@dataclass
class Stack:
    """What serves, and questions to ask it. kind: `cluster`, or `route` for `kappa route`."""

    url: str
    kind: str
    live: object
    http: httpx.Client

    def reserved(self):
        return self.live.router.reservations


class Serving:
    """The stack on an event loop in a thread of its own."""

    kind = "cluster"

    def __init__(self, renderer):
        self._renderer = renderer
        self._ready, self._stop = threading.Event(), threading.Event()
        self._error = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self):
        self._thread.start()
        assert self._ready.wait(_STARTS_S) and self._error is None, self._error
        self._http = httpx.Client(base_url=self.url, timeout=_PATIENCE_S)
        return Stack(self.url, self.kind, self.live, self._http)

    def __exit__(self, *_):
        self._http.close()
        self._stop.set()
        self._thread.join(_PATIENCE_S)
        assert not self._thread.is_alive() and self._error is None, self._error

    def _run(self):
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._error = error
        finally:
            self._ready.set()

    async def _serve(self):
        nodes, limits = (PortedNode("a"), PortedNode("b")), {"max_body_bytes": MAX_BODY_BYTES}
        bounds = Bounds(body_bytes=MAX_BODY_BYTES)
        with pytest.MonkeyPatch.context() as patch:
            serving = clustered(
                self._renderer, patch, *nodes, access=Access(**limits), bounds=bounds
            )
            async with serving as here:
                await self._until_stopped(here.spec.url, here.live)

    async def _until_stopped(self, url, live):
        self.url, self.live = url, live
        self._ready.set()
        while not self._stop.is_set():
            await asyncio.sleep(0.05)


class Fronted(Serving):
    """`kappa route` before a stack."""

    kind = "route"

    def __init__(self, stack):
        super().__init__(None)
        self._behind = stack.url

    async def _serve(self):
        backend = {"url": self._behind, "profile": "h100-pcie5"}
        limits = {"max_body_bytes": MAX_BODY_BYTES}
        passed = ["/openapi.json"]
        async with routing(backend, router=limits, probe={}, passed=passed) as made:
            await self._until_stopped(made.url, made.front.live)


@pytest.fixture(scope="session")
def stack():
    with Serving(PromptRenderer(str(tiny_model()))) as made:
        yield made


@pytest.fixture(scope="module", params=["cluster", "route"])
def face(request, stack):
    """Each of the two faces: a cluster, and `kappa route` before it."""
    if request.param == "cluster":
        yield stack
    else:
        with Fronted(stack) as made:
            yield made

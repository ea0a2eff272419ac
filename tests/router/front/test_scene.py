"""The servers of `kappa route` as Envoy is told of them."""

import asyncio
import json
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from kappa_router.front.scene import FrontScene, endpoint_of
from kappa_router.gateway.endpoints import Resolver
from kappa_router.gateway.spec import ServerEndpoint
from tests.router.patience import until


class TakingGateway:
    """Takes every file at once."""

    def __init__(self, folder):
        self.spec = SimpleNamespace(endpoints_file=folder / "e.json")

    async def servers(self):
        (assignment,) = json.loads(self.spec.endpoints_file.read_text())["resources"]
        rows = [one["endpoint"]["address"] for one in assignment["endpoints"][0]["lb_endpoints"]]
        found = [one["socket_address"] for one in rows]
        return frozenset(f"{one['address']}:{one['port_value']}" for one in found)


def backend(url, **changes):
    settings = SimpleNamespace(worker=url.rpartition("/")[2], url=url, key=None)
    made = {"settings": settings, "known": object(), "refused": "", "usable": True}
    return SimpleNamespace(**{"rank": None, **made, **changes})


@asynccontextmanager
async def followed(folder, *backends, balancer=""):
    """A scene that keeps the file of these servers: itself, and what the file has."""
    front = SimpleNamespace(
        backends={one.settings.worker: one for one in backends}, changed=asyncio.Event(),
        rollout=SimpleNamespace(balancer=balancer), settings=SimpleNamespace(passed=()),
        live=None,
    )  # fmt: skip
    scene = FrontScene(front)
    following = asyncio.create_task(scene.follow(TakingGateway(folder)))

    def listed():
        (assignment,) = json.loads((folder / "e.json").read_text())["resources"]
        rows = assignment["endpoints"][0]["lb_endpoints"]
        return {
            row["endpoint"]["address"]["socket_address"]["port_value"]:
                row["metadata"]["filter_metadata"]["envoy.lb"]["open"] for row in rows
        }  # fmt: skip

    await until(lambda: scene._known.is_set() and not front.changed.is_set())
    yield scene, listed
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def test_server_is_listed_from_its_first_answer_on(tmp_path):
    one, new = backend("http://127.0.0.1:81"), backend("http://127.0.0.1:82", known=None)
    async with followed(tmp_path, one, new) as (scene, listed):
        await until(lambda: scene.address("127.0.0.1:81"))
        assert listed() == {81: True} and scene.address("127.0.0.1:82") == ""
        new.known, one.usable = object(), False
        scene.front.changed.set()
        await until(lambda: scene.address("127.0.0.1:82"))
        # One that is down may be back before Envoy could hear so.
        assert listed() == {81: False, 82: True} and scene.address("127.0.0.1:81")
        new.refused = "another model"
        scene.front.changed.set()
        await until(lambda: not scene.address("127.0.0.1:82"))
        await until(lambda: listed() == {81: False})


async def test_server_at_anothers_address_is_not_used(tmp_path):
    pair = backend("http://127.0.0.1:81/a"), backend("http://127.0.0.1:81/b")
    with capture_logs() as logs:
        async with followed(tmp_path, *pair) as (scene, listed):
            await until(lambda: scene.address("a"))
            for _ in range(3):
                scene.front.changed.set()
                await until(lambda: not scene.front.changed.is_set())
            assert listed() == {81: True} and scene.address("b") == ""
    assert [one["event"] for one in logs] == ["backend_not_used"]
    assert "b and a have the address" in logs[0]["why"]


async def test_present_balancer_is_reached_by_name_alone(tmp_path):
    one = backend("http://127.0.0.1:81")
    async with followed(tmp_path, one, balancer="http://127.0.0.1:90/lb") as (scene, listed):
        await until(lambda: scene.address("http://127.0.0.1:90/lb"))
        assert listed() == {81: True, 90: False}


def at(host, port, name, tls=False, **more):
    return ServerEndpoint("w", host, port, name, tls, key="k", **more)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000", at("127.0.0.1", 8000, "127.0.0.1:8000")),
        ("http://127.0.0.1", at("127.0.0.1", 80, "127.0.0.1")),
        ("https://[::1]/p", at("::1", 443, "::1", True, prefix="/p")),
        ("http://[::1]:7/p/q", at("::1", 7, "[::1]:7", prefix="/p/q")),
    ],
)
async def test_url_is_read_as_envoy_reaches_it(url, expected):
    assert await endpoint_of("w", url, "k", Resolver()) == expected


async def test_name_without_an_address_is_named():
    with pytest.raises(OSError, match=r"nowhere\.invalid has no address"):
        await endpoint_of("w", "http://nowhere.invalid:80", "", Resolver())

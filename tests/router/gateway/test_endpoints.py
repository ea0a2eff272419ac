"""The file of servers, and names that become addresses."""

import asyncio
import json
import socket
import stat

import pytest

from kappa_router.gateway.endpoints import EndpointsFile, Resolver, rendered, shared_addresses
from kappa_router.gateway.spec import ServerEndpoint


def hosts(content):
    (assignment,) = content["resources"]
    (group,) = assignment["endpoints"]
    return group["lb_endpoints"]


def test_server_is_rendered_with_what_it_alone_is_sent():
    one = ServerEndpoint("w", "10.0.0.7", 8000, "gpu.example", tls=True, prefix="/p", key="k")
    (host,) = hosts(rendered([one]))
    assert host["endpoint"]["address"]["socket_address"] == {
        "address": "10.0.0.7", "port_value": 8000,
    }  # fmt: skip
    assert host["endpoint"]["hostname"] == "gpu.example"
    metadata = host["metadata"]["filter_metadata"]
    assert metadata["kappa"] == {"prefix": "/p", "key": "k"}
    assert metadata["envoy.transport_socket_match"] == {"tls": True}


def test_ipv6_address_stands_in_brackets_in_lists():
    assert ServerEndpoint("w", "2001:db8::7", 8000).address == "[2001:db8::7]:8000"


def test_first_of_servers_with_one_address_is_reached():
    servers = [ServerEndpoint("a", "10.0.0.7", 1, prefix="/a"), ServerEndpoint("b", "10.0.0.7", 1)]
    (host,) = hosts(rendered(servers))
    assert host["metadata"]["filter_metadata"]["kappa"] == {"prefix": "/a"}
    (fault,) = shared_addresses([*servers, ServerEndpoint("c", "10.0.0.7", 2)])
    assert fault.startswith("b and a have the address 10.0.0.7:1: ")


def test_file_is_private_and_always_whole(tmp_path):
    path = tmp_path / "endpoints" / "endpoints.json"
    file = EndpointsFile(path)
    assert hosts(json.loads(path.read_text())) == []
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    before = path.stat().st_ino
    assert file.write([ServerEndpoint("a", "10.0.0.7", 1, key="secret")])
    # Moved into place, so that a reader never finds half a file.
    assert path.stat().st_ino != before
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_file_is_written_only_if_it_changes(tmp_path):
    file = EndpointsFile(tmp_path / "endpoints.json")
    servers = [ServerEndpoint("b", "10.0.0.8", 1), ServerEndpoint("a", "10.0.0.7", 1)]
    assert file.write(servers)
    assert not file.write(reversed(servers))
    assert file.write(servers[:1])


def test_servers_from_before_stay_when_it_is_opened_again(tmp_path):
    path = tmp_path / "endpoints.json"
    EndpointsFile(path).write([ServerEndpoint("a", "10.0.0.7", 1)])
    EndpointsFile(path)
    assert len(hosts(json.loads(path.read_text()))) == 1


class Names:
    """A scripted answer to each question about names; an error is raised."""

    def __init__(self, monkeypatch, *answers):
        self.answers, self.asked = list(answers), 0
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "getaddrinfo", self.getaddrinfo)

    async def getaddrinfo(self, host, port, **_):
        self.asked += 1
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            await asyncio.Event().wait()
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in answer]


@pytest.mark.parametrize(
    ("host", "address"),
    [("10.0.0.7", "10.0.0.7"), ("[2001:db8::7]", "2001:db8::7"), ("::1", "::1")],
)
async def test_address_resolves_to_itself(monkeypatch, host, address):
    names = Names(monkeypatch)
    assert await Resolver().address(host, 80) == address
    assert names.asked == 0


async def test_address_that_the_name_still_has_is_kept(monkeypatch):
    Names(monkeypatch, ["10.0.0.7", "10.0.0.8"], ["10.0.0.8", "10.0.0.7"], ["10.0.0.8"])
    resolver = Resolver(keep_s=0.0)
    found = [await resolver.address("gpu", 80) for _ in range(3)]
    assert found == ["10.0.0.7", "10.0.0.7", "10.0.0.8"]


async def test_name_is_not_resolved_again_at_once(monkeypatch):
    names = Names(monkeypatch, ["10.0.0.7"])
    resolver = Resolver()
    assert {await resolver.address("gpu", 80) for _ in range(3)} == {"10.0.0.7"}
    assert names.asked == 1


async def test_last_address_serves_when_names_are_not_answered(monkeypatch):
    gone = socket.gaierror("Temporary failure in name resolution")
    Names(monkeypatch, ["10.0.0.7"], gone, None)
    resolver = Resolver(timeout_s=0.05, keep_s=0.0)
    assert {await resolver.address("gpu", 80) for _ in range(3)} == {"10.0.0.7"}


@pytest.mark.parametrize(
    ("answer", "why"), [(socket.gaierror("unknown"), "unknown"), (None, "no answer in time")]
)
async def test_name_without_address_is_named_with_the_reason(monkeypatch, answer, why):
    Names(monkeypatch, answer)
    with pytest.raises(OSError, match=f"gpu.example has no address: .*{why}"):
        await Resolver(timeout_s=0.05).address("gpu.example", 80)

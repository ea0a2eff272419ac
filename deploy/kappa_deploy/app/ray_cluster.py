"""The Ray cluster of an application: one started here, or one that is joined.

A cluster that is started here listens on loopback, demands a token that only its user can read,
and is stopped whole. From a cluster that is joined only our application is removed, and Ray Serve
itself only if it did not run before.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import stat
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import psutil

from kappa.settings.cluster import home
from kappa_deploy.app.errors import StartError
from kappa_deploy.app.machine import Machine, read_machine

APP = "kappa"
"""Our application's name in Ray Serve."""

_AUTH_MODE, _TOKEN, _TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_NO_TOKEN = (
    "Ray's ports run the code that anybody on this machine sends them: Ray must demand its token, "
    f"{{}}. Unset {_AUTH_MODE}, or set it to token"
)
_ROOT = 0
_OBJECT_STORE_BYTES = 256 << 20
_REACH_S = 5.0
_RAYS_OWN = ("gcs_server", "raylet")
# A replica and its engine's worker process, and the controller and proxy beside them.
_CPUS_PER_WORKER, _CPUS_BESIDE = 2, 2


class OwnRay:
    """Ray on this machine alone, on loopback."""

    joined = False
    # Where workers offer their report streams: nothing listens beyond this machine.
    stream_host = "127.0.0.1"

    def __init__(self, workers: int) -> None:
        """`workers`: as many as it must have CPUs for."""
        wanted = _CPUS_PER_WORKER * workers + _CPUS_BESIDE
        self._cpus = max(os.cpu_count() or 1, wanted)

    def foreseen(self) -> list[Machine]:
        """What the cluster will offer."""
        return [read_machine(self._cpus)]

    def start(self, log_level: str) -> None:
        """Start Ray.

        Raises:
            StartError: it did not come up in Ray's own time, or would run others' code.
        """
        mode = os.environ.get(_AUTH_MODE, "token")
        if mode.lower() != "token":
            raise StartError(_NO_TOKEN.format(f"but {_AUTH_MODE} is {mode!r}"))
        if not os.environ.get(_TOKEN):
            path = Path(os.environ.get(_TOKEN_PATH) or home() / "ray" / "auth_token").absolute()
            private_token(path)
            os.environ[_TOKEN_PATH] = str(path)
        import ray
        from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]  # Cython

        # It has read another, where a Ray ran in this process before.
        AuthenticationTokenLoader.instance().reset_cache()
        # "local": one of our own, even where another Ray runs, or ran, on this machine.
        local = {"address": "local", "num_cpus": self._cpus, "include_dashboard": False}
        try:
            with _loopback():
                _init(log_level, **local, object_store_memory=_OBJECT_STORE_BYTES)
        except Exception as error:  # Ray raises a bare one when a process of its own is late.
            ray.shutdown()
            raise StartError(
                f"Ray did not start: {error} Its logs are in /tmp/ray/session_latest/logs; if this "
                "machine is merely busy, try again when it is less so"
            ) from error
        # Ray's default, which must not change unseen.
        from ray._private.authentication.authentication_utils import is_token_auth_enabled

        if not is_token_auth_enabled():
            ray.shutdown()
            raise StartError(_NO_TOKEN.format("but it started without one"))

    def serve_on(self, log_level: str) -> None:
        """Start Ray Serve, without its HTTP proxy."""
        _start_serve(log_level)

    def dead(self) -> str:
        """Which process has ended that Ray cannot run without; empty while all run."""
        import ray._private.worker

        node = ray._private.worker._global_node
        gone = [] if node is None else [name for name, _ in node.dead_processes()]
        return next((name for name in _RAYS_OWN if name in gone), "")

    def stop(self) -> None:
        """Stop Serve and Ray; nothing happens if they do not run."""
        import ray
        from ray import serve

        if not ray.is_initialized():
            return
        if not self.dead():
            _leave(serve.shutdown)
            return
        # No process is left to answer: every call would wait for a minute.
        below = psutil.Process().children(recursive=True)
        for process in below:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(below, _REACH_S)


class JoinedRay:
    """A Ray cluster that others started."""

    joined = True
    # Each worker offers its stream on its machine's address: readers are on other machines.
    stream_host = ""

    def __init__(self, address: str) -> None:
        """`address`: `HOST:PORT` of its head, or `auto` on one of its machines.

        Raises:
            StartError: it is not such an address.
        """
        if address.startswith("ray://"):
            raise StartError(
                f"--address {address}: Ray's client protocol cannot carry a cluster's application; "
                "run this on a machine of the cluster, with its head's HOST:PORT or auto"
            )
        self._address = address
        self._serve_is_ours = False
        self._deployed = False

    def foreseen(self) -> list[Machine]:
        """Nothing: what it offers is known once it is joined."""
        return []

    def start(self, log_level: str) -> None:
        """Join.

        Raises:
            StartError: nothing answers there, or it runs another version.
        """
        wrong = f"no Ray cluster can be joined at {self._address}: {{}}. "
        if self._address != "auto":
            host, _, port = self._address.rpartition(":")
            try:
                # Find out at once whether anything listens there: Ray would try for minutes.
                socket.create_connection((host.strip("[]"), int(port)), _REACH_S).close()
            except (OSError, ValueError, OverflowError) as error:
                remedy = "Give the HOST:PORT of its head (by default 6379), or auto on one of its"
                raise StartError(f"{wrong.format(error)}{remedy} machines") from None
        try:
            _init(log_level, address=self._address)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise StartError(
                f"{wrong.format(error)}Is one there ('ray start --head'), and is its token yours "
                "(RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or the file that RAY_AUTH_TOKEN_PATH "
                "names)? Without --address one is started here"
            ) from None

    def dead(self) -> str:
        """Empty: the processes of this cluster are watched where it was started."""
        return ""

    def serve_on(self, log_level: str) -> None:
        """Start Ray Serve, without its HTTP proxy, if it does not run there.

        Raises:
            StartError: an application of this name is served there already, or it cannot say so.
        """
        # Ray has no public way to find out.
        from ray.serve.context import _get_global_client

        client: Any = _get_global_client(raise_if_no_controller_running=False)
        if client is None:
            self._serve_is_ours = True
            _start_serve(log_level)
        elif APP in self._applications(client):
            raise StartError(
                f"the cluster at {self._address} serves an application {APP!r} already: stop that "
                "first ('serve shutdown', or a Ctrl-C where it was started)"
            )
        self._deployed = True

    def _applications(self, client: Any) -> Collection[str]:
        """Names of the applications there. `serve.status` would import others' classes here, which
        only their own machines may have."""
        try:
            named: Collection[str] = client.get_serve_details()["applications"]
        except Exception as error:  # of whatever is wrong with any of them
            raise StartError(
                f"the Ray Serve of the cluster at {self._address} does not say what it serves: "
                f"{error}. Look at it with 'serve status' there"
            ) from error
        return named

    def stop(self) -> None:
        """Remove our application and leave; others' applications stay."""
        import ray
        from ray import serve

        def take_back() -> None:
            if self._serve_is_ours:
                serve.shutdown()
            elif self._deployed:
                serve.delete(APP)

        if ray.is_initialized():
            _leave(take_back)


def machines() -> list[Machine]:
    """The machines of the cluster that is connected."""
    import ray

    return [Machine.of_ray(node) for node in ray.nodes() if node["Alive"]]


def private_token(path: Path) -> None:
    """Keep a token for Ray in a file that only its user can read: another reader could run code as
    this user. A token that is there is used on, since a cluster may run by it.

    Raises:
        StartError: others can read the file or replace it, or it cannot be made.
    """
    folder = path.parent
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            with tempfile.NamedTemporaryFile("w", dir=folder) as made:  # 0600
                made.write(secrets.token_hex(32))
                made.flush()
                with contextlib.suppress(FileExistsError):  # of two starts the first one's
                    os.link(made.name, path)
        file, around = path.stat(), folder.stat()
    except OSError as error:
        raise StartError(
            f"Ray's token cannot be kept in {path}: {error.strerror}. Set KAPPA_HOME to a "
            f"folder of yours, or {_TOKEN_PATH} to a file"
        ) from None
    owners, allowed = {file.st_uid, around.st_uid}, {os.geteuid(), _ROOT}
    others_write = around.st_mode & 0o022 and not around.st_mode & stat.S_ISVTX
    again = f"rm {path}, and a new one is made"
    for is_so, what, remedy in (
        (
            file.st_mode & 0o077,
            "may be read by others",
            f"chmod 600 {path}; if it was read, {again}",
        ),
        (others_write, "may be replaced by others", f"chmod 700 {folder}"),
        (owners - allowed, "is another user's", f"name one of yours by {_TOKEN_PATH}"),
        (not file.st_size, "is empty", again),
    ):
        if is_so:
            raise StartError(
                f"Ray's token {path} {what}, and who has it runs code as you: {remedy}"
            )


@contextlib.contextmanager
def _loopback() -> Iterator[None]:
    """Let Ray start as it does where it forms no clusters (macOS): all its processes but the
    replicas' gRPC servers then listen on loopback. It takes no loopback address as an argument."""
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def _init(log_level: str, **options: Any) -> None:
    """Connect to Ray, or start it, as quiet as `log_level` says.

    It puts a handler of its own on SIGTERM, which dumps the stack and aborts: a service manager's
    stop in mid-start would leave processes behind. Ours is put back.
    """
    import ray
    import ray.serve  # sets levels of its own

    for name in ("ray", "ray.serve", "ray._private.authentication"):
        logging.getLogger(name).setLevel(log_level)
    if log_level == "WARNING":
        # Says at every start that token authentication is on, as it should be.
        name = "ray._private.authentication.authentication_token_setup"
        logging.getLogger(name).setLevel("ERROR")
    ours = signal.getsignal(signal.SIGTERM)
    ray.init(
        configure_logging=True,
        logging_level=log_level,
        log_to_driver=log_level in ("DEBUG", "INFO"),
        **options,
    )
    if callable(ours):
        signal.signal(signal.SIGTERM, ours)


def _leave(take_back: Any) -> None:
    import ray

    try:
        take_back()
    except KeyboardInterrupt:
        pass
    finally:
        ray.shutdown()


# -- ports ----------------------------------------------------------------------------------------


def _start_serve(level: str) -> None:
    from ray import serve

    serve.start("Disabled", logging_config={"log_level": level, "enable_access_log": False})


def check_port(host: str, port: int) -> None:
    """Refuse a port that something listens on; raises StartError with what to do."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise StartError(
                f"cannot listen on {host}:{port}: {error.strerror}. Stop what listens there, or "
                "choose another port with --port (0 picks a free one)"
            ) from None


def reachable(host: str) -> str:
    """The host part of a URL for an endpoint of this machine that listens on `host`."""
    match host.strip("[]"):
        case "0.0.0.0" | "":
            return "127.0.0.1"
        case "::":
            return "[::1]"
        case bare:
            return f"[{bare}]" if ":" in bare else bare

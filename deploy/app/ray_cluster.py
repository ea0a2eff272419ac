"""The Ray cluster that an application runs on: one started here, or one that is joined.

What is started here is stopped whole. Of a cluster that is joined only our application is taken
back, and Ray Serve itself only if nobody else used it before.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
from typing import Any

import psutil

from deploy.app.model import StartError
from deploy.app.placing import Machine
from deploy.app.ports import free_port

APP = "kappa"
"""Our application's name in Ray Serve."""

_AUTH_MODE = "RAY_AUTH_MODE"
_NO_TOKEN = (
    "Ray's ports listen on every address of this machine and run the code that they are sent: Ray "
    f"must demand its token, {{}}. Unset {_AUTH_MODE}, or set it to token"
)
_OBJECT_STORE_BYTES = 256 << 20
_REACH_S = 5.0
_RAYS_OWN = ("gcs_server", "raylet")
# A replica and its engine's worker process, and the controller and proxy beside them.
_CPUS_PER_WORKER, _CPUS_BESIDE = 2, 2


class OwnRay:
    """Ray on this machine alone, on loopback."""

    joined = False
    stream_host = "127.0.0.1"
    """Where workers offer their report streams: nothing listens beyond this machine."""

    def __init__(self, workers: int) -> None:
        """`workers`: as many as it must have CPUs for."""
        wanted = _CPUS_PER_WORKER * workers + _CPUS_BESIDE
        self._cpus = max(os.cpu_count() or 1, wanted)
        self._log_level = "WARNING"

    def foreseen(self) -> list[Machine]:
        """What the cluster will offer, as far as that is known before it runs: GPUs are not."""
        return [Machine("this machine", {"CPU": float(self._cpus), "GPU": math.inf})]

    def start(self, log_level: str) -> None:
        """Start Ray.

        Raises:
            StartError: it did not come up in Ray's own time, or would run anybody's code.
        """
        mode = os.environ.get(_AUTH_MODE, "token")
        if mode.lower() != "token":
            raise StartError(_NO_TOKEN.format(f"but {_AUTH_MODE} is {mode!r}"))
        import ray

        self._log_level = log_level
        _quiet_ray(log_level)
        try:
            ray.init(
                num_cpus=self._cpus,
                include_dashboard=False,
                configure_logging=True,
                logging_level=log_level,
                log_to_driver=log_level in ("DEBUG", "INFO"),
                object_store_memory=_OBJECT_STORE_BYTES,
            )
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

    def machines(self) -> list[Machine]:
        """The machines of the cluster."""
        return _machines()

    def serve_on(self, host: str, port: int) -> tuple[str, int]:
        """Start Ray Serve; returns where it listens, `port` 0 being a free one."""
        port = port or free_port(host)
        _start_serve(host, port, self._log_level)
        return host, port

    def dead(self) -> str:
        """Which of the processes without which Ray does not run has ended, as "" while none has."""
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
        if self.dead():
            # Nobody is left to answer: every call would wait for a minute.
            _kill_ray()
            return
        try:
            serve.shutdown()
        except KeyboardInterrupt:
            pass
        finally:
            ray.shutdown()


class JoinedRay:
    """A Ray cluster that others started."""

    joined = True
    stream_host = ""
    """Each worker offers its stream on its machine's address: readers are on other machines."""

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
        self._log_level = "WARNING"
        self._serve_is_ours = False
        self._deployed = False

    def foreseen(self) -> list[Machine]:
        """Nothing is known of it before it is joined."""
        return []

    def start(self, log_level: str) -> None:
        """Join.

        Raises:
            StartError: nothing answers there, or it runs another version.
        """
        self._reach()
        import ray

        self._log_level = log_level
        _quiet_ray(log_level)
        try:
            ray.init(
                address=self._address,
                configure_logging=True,
                logging_level=log_level,
                log_to_driver=log_level in ("DEBUG", "INFO"),
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise StartError(
                f"no Ray cluster can be joined at {self._address}: {error}. Is one there "
                "('ray start --head'), and is its token yours (RAY_AUTH_TOKEN, or the file that "
                "RAY_AUTH_TOKEN_PATH names)? Without --address one is started here"
            ) from None

    def _reach(self) -> None:
        """Find out at once whether anything listens there: Ray would try for minutes."""
        if self._address == "auto":
            return
        host, _, port = self._address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), _REACH_S).close()
        except (OSError, ValueError, OverflowError) as error:
            raise StartError(
                f"no Ray cluster can be joined at {self._address}: {error}. Give the HOST:PORT of "
                "its head (6379 unless told otherwise), or auto on one of its machines"
            ) from None

    def machines(self) -> list[Machine]:
        """The machines of the cluster."""
        return _machines()

    def dead(self) -> str:
        """Nothing: whoever started this cluster looks after its processes."""
        return ""

    def serve_on(self, host: str, port: int) -> tuple[str, int]:
        """Start Ray Serve if it does not run there; returns where it listens.

        Raises:
            StartError: an application of this name is served there already, or nothing over HTTP.
        """
        from ray import serve

        running = _serve_address()
        if running is None:
            self._serve_is_ours = True
            port = port or free_port(host)
            _start_serve(host, port, self._log_level)
            running = host, port
        elif APP in serve.status().applications:
            raise StartError(
                f"the cluster at {self._address} serves an application {APP!r} already: stop that "
                "first ('serve shutdown', or a Ctrl-C where it was started)"
            )
        self._deployed = True
        return running

    def stop(self) -> None:
        """Take our application back and leave; others' stay."""
        import ray
        from ray import serve

        if not ray.is_initialized():
            return
        try:
            if self._serve_is_ours:
                serve.shutdown()
            elif self._deployed and APP in serve.status().applications:
                serve.delete(APP)
        except KeyboardInterrupt:
            pass
        finally:
            ray.shutdown()


def _machines() -> list[Machine]:
    import ray

    return [Machine.of_ray(node) for node in ray.nodes() if node["Alive"]]


def _kill_ray() -> None:
    """End all that this process started, without asking Ray."""
    below = psutil.Process().children(recursive=True)
    for process in below:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(below, _REACH_S)


def _start_serve(host: str, port: int, level: str) -> None:
    from ray import serve

    serve.start(
        http_options={"host": host, "port": port},
        logging_config={"log_level": level, "enable_access_log": False},
    )


def _serve_address() -> tuple[str, int] | None:
    """Where a running Ray Serve listens, None if none runs. Ray has no public way to ask."""
    from ray.serve.context import _get_global_client

    client: Any = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return None
    options = client.http_config
    if options.host is None:
        raise StartError(
            "Ray Serve runs there without an HTTP proxy, so it can be asked nothing: stop it "
            "('serve shutdown'), and it is started with one here"
        )
    return str(options.host), int(options.port)


def _quiet_ray(level: str) -> None:
    """After Ray Serve is imported, which sets its own levels."""
    import ray.serve  # noqa: F401

    for name in ("ray", "ray.serve", "ray._private.authentication"):
        logging.getLogger(name).setLevel(level)
    if level == "WARNING":
        # Says at every start that token authentication is on, as it should be.
        name = "ray._private.authentication.authentication_token_setup"
        logging.getLogger(name).setLevel("ERROR")

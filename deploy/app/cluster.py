"""A cluster on this machine: Ray started, the application deployed and warm, all stopped again.

`Cluster` keeps Ray on loopback with its own temporary folder, and is ready when every worker has
answered real requests.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx

from deploy.app.access import own_headers
from deploy.app.build import build_app
from deploy.app.model import StartError, prepare_model
from kappa.settings.cluster import ClusterSettings

Progress = Callable[[str], None]

_WARM_TIMEOUT_S = 180.0
# One more than the router's calibration needs before it believes its samples.
_WARM_ROUNDS = 7
_APP = "kappa"


class Cluster:
    """A running cluster; use as a context manager."""

    engines_beside = 0
    """Engines that a subclass starts next to ours; Ray is told of CPUs for them."""

    def __init__(self, settings: ClusterSettings, progress: Progress = lambda _: None) -> None:
        self.settings = settings
        self._progress = progress
        self.url = ""

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self) -> None:
        _quiet(self.settings.log_level)
        http = self.settings.http
        if http.port:
            check_port(http.host, http.port)  # before seconds are spent on what cannot be reached
        self._progress("preparing the model")
        model = prepare_model(self.settings)
        self._progress("starting Ray")
        import ray
        from ray import serve

        _quiet_ray(self.settings.log_level)
        engines = sum(pool.most for pool in self.settings.all_pools) + self.engines_beside
        ray.init(
            num_cpus=max(os.cpu_count() or 1, 2 * engines + 2),
            include_dashboard=False,
            configure_logging=True,
            logging_level=self.settings.log_level,
            log_to_driver=self.settings.log_level in ("DEBUG", "INFO"),
            object_store_memory=256 << 20,
        )
        port = http.port or free_port(http.host)
        serve.start(
            http_options={"host": http.host, "port": port},
            logging_config={"log_level": self.settings.log_level, "enable_access_log": False},
        )
        self._progress(f"starting {self.settings.workers} engines")
        try:
            serve.run(build_app(self.settings, model), name=_APP, route_prefix="/")
        except (RuntimeError, ValueError) as error:
            raise StartError(
                f"the engines did not start: {error}. Their logs are in /tmp/ray/session_latest/"
                "logs; run with --log-level INFO to see them here"
            ) from None
        self.url = f"http://{http.host}:{port}"
        self._progress("warming up")
        self._warm_up()

    def _warm_up(self) -> None:
        """Wait for all workers, then send each some requests.

        The first ones are slow, and from the next the router learns what a request costs besides
        the engine.
        """
        deadline = time.monotonic() + _WARM_TIMEOUT_S
        wanted = self.settings.workers
        headers = own_headers(self.settings)
        with httpx.Client(base_url=self.url, timeout=60.0, headers=headers) as client:
            while time.monotonic() < deadline:
                try:
                    if client.get("/ready").json()["workers"] >= wanted:
                        break
                except (httpx.HTTPError, ValueError, KeyError):
                    pass
                time.sleep(0.5)
            else:
                raise StartError(f"not all of {wanted} workers reported within {_WARM_TIMEOUT_S} s")
            # A round at once: each one's reservation sends the next to another worker.
            with ThreadPoolExecutor(wanted) as pool:
                for turn in range(_WARM_ROUNDS):
                    list(pool.map(lambda i, t=turn: self._ask(client, i, t), range(wanted)))

    def _ask(self, client: httpx.Client, number: int, turn: int) -> None:
        body = {
            "model": self.settings.model.id,
            "messages": [{"role": "user", "content": f"warm up {number} {turn}"}],
            "max_tokens": 2,
            "stream": turn > 0,
        }
        client.post("/v1/chat/completions", json=body).raise_for_status()

    def stop(self) -> None:
        """Stop serving and Ray; safe to call twice. A Ctrl-C meanwhile skips the polite part."""
        import ray
        from ray import serve

        if not ray.is_initialized():
            return
        with _unheard(self.settings.log_level):
            try:
                serve.shutdown()
            except KeyboardInterrupt:
                pass
            finally:
                ray.shutdown()


def _quiet(level: str) -> None:
    """Before Ray and vLLM are imported."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", level)
    for name in ("httpx", "httpx2"):
        logging.getLogger(name).setLevel(level)


def _quiet_ray(level: str) -> None:
    """After Ray Serve is imported, which sets its own levels."""
    for name in ("ray", "ray.serve", "ray._private.authentication"):
        logging.getLogger(name).setLevel(level)
    if level == "WARNING":
        # Says at every start that token authentication is on, as it should be.
        name = "ray._private.authentication.authentication_token_setup"
        logging.getLogger(name).setLevel("ERROR")


@contextlib.contextmanager
def _unheard(level: str) -> Iterator[None]:
    """Ray reports, on standard output, that the controller which we stop has stopped."""
    if level in ("DEBUG", "INFO"):
        yield
        return
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        yield


def free_port(host: str) -> int:
    """A TCP port on `host` that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
    return port


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

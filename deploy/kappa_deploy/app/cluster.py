"""A running cluster: Ray started or joined, the application deployed and warm, then taken back.

Without an address `Cluster` starts Ray on this machine, on loopback, and stops it whole. With an
address it joins that Ray cluster and later removes only its own application. It is ready when every
worker has answered real requests.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import httpx

from kappa.settings.cluster import ClusterSettings
from kappa_deploy.app.build import build_app, own_headers
from kappa_deploy.app.errors import PreflightError, StartError
from kappa_deploy.app.model import Model, models_here, prepare_models
from kappa_deploy.app.ray_cluster import APP, JoinedRay, OwnRay, check_port, machines, reachable
from kappa_deploy.checks.facts import Facts
from kappa_deploy.checks.findings import faults
from kappa_deploy.checks.table import findings

if TYPE_CHECKING:
    from kappa_deploy.app.front_door import FrontDoor
    from kappa_router.gateway.spec import GatewaySpec

Progress = Callable[[str], None]

_WARM_TIMEOUT_S = 180.0
_LOGS = "Their logs are in /tmp/ray/session_latest/logs; run with --log-level INFO to see them here"
_POLICY_TIMEOUT_S = 30.0
# One more than the router's calibration needs before it believes its samples.
_WARM_ROUNDS = 7


def set_environment(log_level: str) -> None:
    """Set variables for this process and its children; call it before Ray and vLLM are imported."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray's own 15 gives engines and fronts a thirtieth of what else runs gets of a busy core.
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", log_level)
    for name in ("httpx", "httpx2"):
        logging.getLogger(name).setLevel(log_level)


class Cluster:
    """A running cluster; use as a context manager."""

    def __init__(
        self,
        settings: ClusterSettings,
        progress: Progress = lambda _: None,
        address: str | None = None,
    ) -> None:
        """`address`: of a running Ray cluster to join, `HOST:PORT` or `auto`; none: start one."""
        self.settings = settings
        self._progress = progress
        most = sum(pool.most for pool in settings.all_pools)
        self._ray = JoinedRay(address) if address else OwnRay(most)
        self._door: FrontDoor | None = None
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
        set_environment(self.settings.log_level)
        http = self.settings.http
        if http.port:
            check_port(http.host, http.port)  # before seconds are spent on what cannot be reached
        foreseen = self._ray.foreseen()
        self._progress("preparing the model")
        here, unread = zip(*models_here(self.settings), strict=True)
        self._check(Facts(self.settings, here, [why for why in unread if why], foreseen))
        models = [model for model in here if model is not None]
        if len(models) < len(here):
            models = prepare_models(self.settings, self._progress)
            self._check(Facts(self.settings, models, machines=foreseen))
        self._progress("joining Ray" if self._ray.joined else "starting Ray")
        self._ray.start(self.settings.log_level)
        if self._ray.joined:
            self._check(Facts(self.settings, models, machines=machines()))
        self._ray.serve_on(self.settings.log_level)
        # Imported here, since it takes half a second and needs no Ray.
        from kappa_deploy.app.front_door import FrontDoor

        self._door = FrontDoor(self.settings)
        self._door.start()
        self._progress(f"starting {self.settings.workers} engines")
        self._deploy(models, self._door.spec)
        spec = self._door.spec
        self.url = f"{spec.scheme}://{reachable(spec.host)}:{spec.port}"
        self._progress("warming up")
        self._warm_up()

    def _check(self, facts: Facts) -> None:
        if wrong := faults(findings("start", facts)):
            raise PreflightError("\n".join(wrong))

    def _deploy(self, models: Sequence[Model], door: GatewaySpec) -> None:
        from ray import serve

        app = build_app(self.settings, models, door, self._ray.stream_host)
        try:
            serve.run(app, name=APP, route_prefix=None)
        except (RuntimeError, ValueError) as error:
            raise StartError(f"the engines did not start: {error}. {_LOGS}") from None

    def _warm_up(self) -> None:
        """Wait for all workers, then send each some requests.

        The first ones are slow, and from the next the router learns what a request costs besides
        the engine.
        """
        deadline = time.monotonic() + _WARM_TIMEOUT_S
        wanted = self.settings.workers
        headers, last = own_headers(self.settings), ""
        with httpx.Client(base_url=self.url, timeout=60.0, headers=headers) as client:
            while time.monotonic() < deadline:
                try:
                    found = client.get("/ready").json()["workers"]
                    if found >= wanted:
                        break
                    last = f"{found} did"
                except (httpx.HTTPError, ValueError, KeyError) as error:
                    last = repr(error)
                time.sleep(0.5)
            else:
                raise StartError(
                    f"not all of {wanted} workers reported within {_WARM_TIMEOUT_S:g} s: "
                    f"{last[:300]}. {_LOGS}"
                )
            names = [one.model.id for one in self.settings.by_model() for _ in range(one.workers)]
            # A round at once: each one's reservation sends the next to another worker.
            with ThreadPoolExecutor(wanted) as pool:
                for turn in range(_WARM_ROUNDS):
                    list(pool.map(partial(self._warm, client, turn), range(wanted), names))

    def _warm(self, client: httpx.Client, turn: int, number: int, model: str) -> None:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": f"warm up {number} {turn}"}],
            "max_tokens": 2,
            "stream": turn > 0,
        }
        client.post("/v1/chat/completions", json=body).raise_for_status()

    def use_policy(self, name: str) -> None:
        """Let its only decider choose by another policy from now on."""
        from ray import serve

        serve.get_app_handle(APP).use_policy.remote(name).result(timeout_s=_POLICY_TIMEOUT_S)

    def ended(self) -> str:
        """Why the cluster can serve no more; empty while it can."""
        if self._door is not None and (why := self._door.ended()):
            return f"{why}; start the cluster again"
        dead = self._ray.dead()
        return f"Ray's {dead} has ended, and the cluster with it: start it again" if dead else ""

    def stop(self) -> None:
        """Take back what was started; safe to call twice. Ctrl-C skips the polite part."""
        with contextlib.ExitStack() as quiet:
            if self.settings.log_level not in ("DEBUG", "INFO"):
                # Ray reports that the controller which we stop has stopped.
                quiet.enter_context(contextlib.redirect_stdout(io.StringIO()))
                quiet.enter_context(contextlib.redirect_stderr(io.StringIO()))
            try:
                if self._door is not None:
                    self._door.stop(max(pool.drain_s for pool in self.settings.all_pools))
            finally:
                self._ray.stop()

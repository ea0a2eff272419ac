"""Where everything is wired: settings in, a running Ray Serve application out.

The only module that imports all packages. `Cluster` starts Ray (on loopback, with its own
temporary folder), deploys workers and ingress, waits until a real request has been answered, and
stops all of it again.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from kappa.hardware import node_profile
from kappa.settings.cluster import ClusterSettings, home
from kappa.shapes import shape_from_config
from kappa.types import ModelShape, NodeProfile
from workers.tiny_model import make_tiny_model
from workload.sessions import demo_sessions_path, read_sessions

Progress = Callable[[str], None]

_WARM_TIMEOUT_S = 180.0
# One more than the router's calibration needs before it believes its samples.
_WARM_ROUNDS = 7
_REPLICA_CPUS = 1
_APP = "kappa"


class StartError(RuntimeError):
    """The cluster could not be started; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model on disk or by name: where it is, its shape and its chat template."""

    source: str
    shape: ModelShape
    chat_template: str


def prepare_model(settings: ClusterSettings) -> Model:
    """Find the configured model, or make the tiny one (once; cached under `KAPPA_HOME`)."""
    source = settings.model.source
    if source is None:
        turns = (turn for s in read_sessions(demo_sessions_path()) for turn in s.turns)
        corpus = (text for turn in turns for text in (turn.input_text, turn.output_text))
        folder = home() / "models" / f"tiny-{settings.model.seed}"
        source = str(make_tiny_model(folder, corpus, seed=settings.model.seed))
    from transformers import AutoConfig, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(source).to_dict()
        template = AutoTokenizer.from_pretrained(source).chat_template or ""
    except (OSError, ValueError) as error:
        raise StartError(f"model.source {source!r} cannot be loaded: {error}") from None
    dtype = settings.engine.dtype
    shape = shape_from_config(config, name=settings.model.id, kv_dtype=dtype, weight_dtype=dtype)
    return Model(source, shape, str(template))


def worker_nodes(settings: ClusterSettings) -> tuple[NodeProfile, ...]:
    """One profile per worker, in rank order: paced ones in dilated time, others as priors."""
    return tuple(
        node.node(settings.dilation)
        if node.paced
        else _prior(node_profile(node.profile), node.name)
        for node in settings.nodes
    )


def _prior(profile: NodeProfile, name: str) -> NodeProfile:
    return replace(profile, name=name, source="catalogue")


def build_app(settings: ClusterSettings, model: Model, stream_host: str = "127.0.0.1") -> Any:
    """The Serve application: `KappaServer` replicas behind a `KappaIngress`.

    `stream_host`: where workers offer their report streams; empty: each on its machine's address.

    Raises:
        StartError: settings that do not go together, and what to change.
    """
    _refuse_what_does_not_go_together(settings)
    from ray import serve
    from ray.llm._internal.serve.core.configs.openai_api_models import to_model_metadata
    from ray.serve.llm import build_llm_deployment

    from router.ingress import make_ingress
    from workers.deployment import KappaServer

    model_id, limits = settings.model.id, settings.router
    config = _llm_config(settings, model)
    plan = _worker_plan(settings, model, stream_host)
    workers = build_llm_deployment(config, bind_kwargs={"plan": plan}, deployment_cls=KappaServer)
    ingress = serve.deployment(
        make_ingress(limits.max_body_bytes, _tenants(settings)),
        name="KappaIngress",
        num_replicas=1,
        max_ongoing_requests=4 * limits.max_queue,
        health_check_period_s=5,
        graceful_shutdown_timeout_s=5,
        ray_actor_options={"num_cpus": 0},
    )
    return ingress.bind(
        llm_deployments={model_id: workers},
        model_cards={model_id: to_model_metadata(model_id, config)},
        kappa=_ingress_settings(settings, model),
    )


def _refuse_what_does_not_go_together(settings: ClusterSettings) -> None:
    paced = [node.name for node in settings.nodes if node.paced]
    if settings.engine.kind == "torch" and paced:
        raise StartError(
            f"engine.kind is torch, which cannot be paced, but nodes {', '.join(paced)} are: say "
            "'paced: false' for each, or start with --unpaced"
        )
    if settings.engine.kind == "torch" and settings.scheduler.name == "stock":
        raise StartError(
            "scheduler.name is stock, which is vLLM's own: with engine.kind torch name another "
            "rule, such as fair"
        )


def _llm_config(settings: ClusterSettings, model: Model) -> Any:
    """Ray Serve LLM's configuration of the workers' deployment."""
    from ray.serve.llm import LLMConfig

    from workers.vllm_engine import CPU_ENV

    return LLMConfig(
        model_loading_config={"model_id": settings.model.id, "model_source": model.source},
        engine_kwargs={"enable_prompt_tokens_details": True, **settings.engine.extra},
        accelerator_config={"kind": "cpu"},
        placement_group_config={"bundles": [{"CPU": _REPLICA_CPUS}]},
        deployment_config={
            "num_replicas": len(settings.nodes),
            "max_ongoing_requests": 4 * settings.router.max_queue,
            "max_constructor_retry_count": 2,
            "health_check_period_s": 2,
            "health_check_timeout_s": 10,
            "graceful_shutdown_timeout_s": 5,
            "request_router_config": {
                "request_router_class": "router.ray_router.KappaRouter",
                "request_routing_stats_period_s": 1,
                "request_routing_stats_timeout_s": 10,
            },
            "ray_actor_options": {"num_cpus": _REPLICA_CPUS},
        },
        callback_config={"callback_class": "workers.no_download.NoDownload"},
        runtime_env={"env_vars": {**CPU_ENV, "HF_HUB_OFFLINE": _offline(settings)}},
        log_engine_metrics=settings.engine.metrics,
    )


def _worker_plan(settings: ClusterSettings, model: Model, stream_host: str) -> Any:
    """What each replica must know before its engine starts."""
    from workers.identity import WorkerPlan
    from workers.vllm_engine import EngineLimits

    e = settings.engine
    return WorkerPlan(
        nodes=worker_nodes(settings),
        served=model.shape,
        emulated=settings.model.emulated_shape,
        limits=EngineLimits(
            e.max_context_tokens, e.block_tokens, e.device_blocks, e.host_bytes,
            e.max_batch_tokens, e.max_sequences, e.dtype,
        ),
        model_source=model.source,
        chat_template=model.chat_template,
        cache_dir=str(home()),
        # Loopback in a cluster that we start: it is on one machine, nothing listens beyond it.
        stream_host=stream_host,
        scheduler=_engine_scheduler(settings),
        kind=e.kind,
        planner=e.planner if e.kind == "torch" else "",
        act_share=e.act_share,
    )  # fmt: skip


def _engine_scheduler(settings: ClusterSettings) -> Any:
    """What every engine schedules by."""
    from workers.vllm_engine import EngineScheduler

    s = settings.scheduler
    return EngineScheduler(
        rule=s.name,
        config={
            "weights": dict(settings.tenants.weights), "max_skips": s.max_skips,
            "due_after_s": s.due_after_s, "window": s.window, "slack_s": s.slack_s,
            "credit": s.credit, "reserve": s.reserve,
        },
        link={
            "duplex": s.duplex, "order": s.link_order, "store_backlog_s": s.store_backlog_s,
        },
        # Replicas have working folders of their own.
        log=str(Path(s.log).absolute()) if s.log else None,
    )  # fmt: skip


def _ingress_settings(settings: ClusterSettings, model: Model) -> Any:
    """What the ingress is told; the secret of its hashes is new at every start."""
    from router.ingress import IngressSettings

    r = settings.router
    return IngressSettings(
        tokenizer_source=model.source,
        policy=r.policy,
        index_blocks=r.index_blocks,
        max_queue=r.max_queue,
        stale_after_s=r.stale_after_s,
        calibrate=r.calibrate,
        calibrate_requests=r.calibrate_requests,
        request_timeout_s=r.request_timeout_s,
        secret=secrets.token_hex(16),
        record=r.record,
        forecast_workers=r.forecast_workers,
        admission=r.admission,
        tenants=_tenants(settings),
    )


def _tenants(settings: ClusterSettings) -> Any:
    """The tenants' table; of their keys it holds digests only."""
    from router.tenants import Tenants

    t = settings.tenants
    return Tenants.of(
        {key.get_secret_value(): name for key, name in t.by_key.items()},
        t.weights,
        t.default_name,
        refuse=t.unknown == "refuse",
    )


def own_headers(settings: ClusterSettings) -> dict[str, str]:
    """What our own requests must send where those without a key are refused: some tenant's."""
    if settings.tenants.unknown != "refuse":
        return {}
    key = next(iter(settings.tenants.by_key))
    return {"authorization": f"Bearer {key.get_secret_value()}"}


def _offline(settings: ClusterSettings) -> str:
    source = settings.model.source
    return "0" if source is not None and not Path(source).exists() else "1"


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
            _check_port(http.host, http.port)  # before seconds are spent on what cannot be reached
        self._progress("preparing the model")
        model = prepare_model(self.settings)
        self._progress("starting Ray")
        import ray
        from ray import serve

        _quiet_ray(self.settings.log_level)
        engines = len(self.settings.nodes) + self.engines_beside
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
        self._progress(f"starting {len(self.settings.nodes)} engines")
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
        wanted = len(self.settings.nodes)
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


def _check_port(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise StartError(
                f"cannot listen on {host}:{port}: {error.strerror}. Stop what listens there, or "
                "choose another port with --port (0 picks a free one)"
            ) from None

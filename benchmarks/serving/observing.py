"""Our cluster twice, with everything observed and with nothing: `kappa bench serve --observing`.

One Ray, one HTTP proxy, one unpaced engine each, all settings alike but the observing ones: at one
metrics, a JSON line per request in a file and, if wanted, spans of every request to a collector
here; at the other none of that. Started twice, as each of them may stand in either place.
"""

from __future__ import annotations

import contextlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil

from deploy.app.build import build_app
from deploy.app.cluster import Cluster
from deploy.app.model import prepare_model
from deploy.app.ray_cluster import APP
from kappa.settings.cluster import ClusterSettings
from kappa.settings.observing import ObservingSettings

SEEN, UNSEEN = "seen", "unseen"
ORDERS = ((SEEN, UNSEEN), (UNSEEN, SEEN))
"""Who stands at `/` and who beside it: the place alone may be worth some requests/s."""

BESIDE = "/beside"
_BESIDE_APP = "beside"

_UNSEEN = ObservingSettings(metrics=False, request_log=False)


class Collector:
    """Takes spans and throws them away; counts the requests that brought them."""

    def __init__(self) -> None:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("content-length", 0)))
                collector.batches += 1
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Nothing."""

        self.batches = 0
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)


def seen(settings: ClusterSettings, log_file: Path, collector: Collector | None) -> ClusterSettings:
    """The settings with metrics and logs, and spans of every request if somebody takes them."""
    endpoint = collector.url if collector is not None else None
    observing = ObservingSettings(log_format="json", log_file=str(log_file), otlp_endpoint=endpoint)
    return settings.model_copy(update={"observing": observing})


def unseen(settings: ClusterSettings) -> ClusterSettings:
    """The settings with nothing observed."""
    return settings.model_copy(update={"observing": _UNSEEN})


def cpu_seconds(first: str, system: str) -> float:
    """Processor seconds so far of a system's ingress and engine; `first` is the one at `/`."""
    title = f"ray::ServeReplica:{APP if system == first else _BESIDE_APP}:"
    total_s = 0.0
    for process in psutil.process_iter():
        # A process may end while it is looked at; the engines stay.
        with contextlib.suppress(psutil.NoSuchProcess):
            if (process.cmdline() or [""])[0].startswith(title):
                for each in (process, *process.children(recursive=True)):
                    used = each.cpu_times()
                    total_s += used.user + used.system
    return total_s


def beside(second: ClusterSettings) -> type[Cluster]:
    """A kind of cluster that has another one beside it, on the same Ray and proxy."""

    class PairCluster(Cluster):
        engines_beside = 1

        def _start(self) -> None:
            super()._start()
            from ray import serve

            self._progress("starting the one beside it")
            app = build_app(second, prepare_model(second))
            serve.run(app, name=_BESIDE_APP, route_prefix=BESIDE)

    return PairCluster

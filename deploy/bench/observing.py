"""Our cluster twice, with everything observed and with nothing: `kappa bench serve --observing`.

One Ray, one HTTP proxy, one unpaced engine each, all settings alike but the observing ones: at `/`
metrics, a JSON line per request in a file, and spans of every request to a collector here; at
`/unseen` none of that.
"""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from deploy.app.build import build_app
from deploy.app.cluster import Cluster
from deploy.app.model import prepare_model
from kappa.settings.cluster import ClusterSettings
from kappa.settings.observing import ObservingSettings

SYSTEMS = {"seen": "", "unseen": "/unseen"}
"""Route prefix of each."""

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


def seen(settings: ClusterSettings, collector: Collector, log_file: Path) -> ClusterSettings:
    """The settings with everything observed."""
    observing = ObservingSettings(
        log_format="json", log_file=str(log_file), otlp_endpoint=collector.url
    )
    return settings.model_copy(update={"observing": observing})


class ObservingCluster(Cluster):
    """A cluster of ours, and the same without anything observed beside it."""

    engines_beside = len(SYSTEMS) - 1

    def _start(self) -> None:
        super()._start()
        from ray import serve

        self._progress("starting the one that is not observed")
        unseen = self.settings.model_copy(update={"observing": _UNSEEN})
        app = build_app(unseen, prepare_model(unseen))
        serve.run(app, name="unseen", route_prefix=SYSTEMS["unseen"])

"""What the containers of a front pod run beside Envoy and Ray: `python -m kappa_deploy.front_pod
VERB`.

On Kubernetes a front pod has a Ray node with one decider, and an Envoy that asks it; they meet in a
folder that both mount. `prepare FROM` makes it, with the configuration that is mounted at FROM;
`alive` fails where Envoy does not answer; `drain SECONDS`, before the pod goes, has Envoy refuse
new requests and waits for open ones. Probes run it often, so it imports little.
"""

from __future__ import annotations

import argparse
import http.client
import shutil
import socket
import sys
import time
from pathlib import Path

from kappa_router.gateway.spec import GatewaySpec

FOLDER = Path("/run/kappa/front")
"""Where decider and Envoy meet."""
RESOURCE = "kappa_front"
"""Of Ray's: a front pod offers one, a decider demands one."""

_ASK_S, _POLL_S = 2.0, 0.25
# Seconds that Envoy still takes requests (its --drain-time-s): clients learn late of the drain.
UNLISTED_S = 10.0
_OPEN = "http.front.downstream_rq_active"


class _Admin(http.client.HTTPConnection):
    """Envoy's administration interface."""

    def __init__(self, folder: Path) -> None:
        super().__init__("envoy", timeout=_ASK_S)
        self._path = str(_place(folder).admin_socket)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(_ASK_S)
        self.sock.connect(self._path)


def prepare(source: Path, folder: Path = FOLDER) -> None:
    """Make the folder, for this user alone, with Envoy's files of `source` and a list of no
    servers. Raises OSError."""
    from kappa_router.gateway.endpoints import EndpointsFile

    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for file in source.glob("*.json"):
        shutil.copyfile(file, folder / file.name)
    EndpointsFile(_place(folder).endpoints_file)


def ask(method: str, target: str, folder: Path = FOLDER) -> str:
    """Envoy's answer to a request of its administration interface.

    Raises:
        OSError: it does not answer 200 in time.
    """
    admin = _Admin(folder)
    try:
        admin.request(method, target)
        answer = admin.getresponse()
        text = answer.read().decode()
    except http.client.HTTPException as error:
        raise OSError(f"Envoy breaks off: {error!r}") from None
    finally:
        admin.close()
    if answer.status != 200:
        raise OSError(f"Envoy answers {answer.status} to {target}: {text[:200]}")
    return text


def drain(most_s: float, folder: Path = FOLDER, unlisted_s: float = UNLISTED_S) -> int:
    """Have Envoy end its listener after `unlisted_s`, and wait up to `most_s` for open requests;
    how many are left. Raises OSError where Envoy does not answer."""
    until_s = time.monotonic() + most_s
    ask("POST", "/drain_listeners?graceful", folder)
    time.sleep(min(unlisted_s, most_s))
    while (left := _open(folder)) and time.monotonic() < until_s:
        time.sleep(_POLL_S)
    return left


def _open(folder: Path) -> int:
    try:
        said = ask("GET", f"/stats?format=text&filter=^{_OPEN}$", folder)
    except (ConnectionError, FileNotFoundError):
        return 0  # Its own container's drain ended first, and it with that.
    return int(said.partition(": ")[2] or 0)


def _place(folder: Path) -> GatewaySpec:
    return GatewaySpec(folder, host="", port=0, decided=(), own=())


def main(arguments: list[str] | None = None) -> int:
    """Run a verb; 1 where it cannot do its work."""
    parser = argparse.ArgumentParser(prog="python -m kappa_deploy.front_pod", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("prepare").add_argument("source", type=Path)
    verbs.add_parser("alive")
    verbs.add_parser("drain").add_argument("most_s", type=float)
    options = parser.parse_args(arguments)
    try:
        match options.verb:
            case "prepare":
                prepare(options.source)
            case "alive":
                ask("GET", "/ready")
            case _:
                drain(options.most_s)
    except OSError as error:
        print(f"{FOLDER}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

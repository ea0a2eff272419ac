"""TCP ports of this machine: a free one, or a complaint about one that is taken."""

from __future__ import annotations

import socket

from deploy.app.model import StartError


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


def reachable(host: str) -> str:
    """What to write into a URL for an endpoint of this machine that listens on `host`."""
    match host.strip("[]"):
        case "0.0.0.0" | "":
            return "127.0.0.1"
        case "::":
            return "[::1]"
        case bare:
            return f"[{bare}]" if ":" in bare else bare

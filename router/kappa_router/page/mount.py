"""Adds the page to an application: one static file at `/`, without a key and without data.

A browser cannot send a key with the address that somebody types, so the file is for everybody and
the feeds that it asks are not. What it may do is said in its headers, so that a name in a feed that
looks like markup could do nothing even if the page had a fault: no script or style but its own (by
hash), no request but to where it came from, no text parsed as markup (trusted types).
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


def content_security_policy(html: str) -> str:
    """The policy that lets the file's own script and style run, and nothing else."""
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for kind, text in _INLINE.findall(html):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
    rules = (
        "default-src 'none'", f"script-src {' '.join(hashes['script'])}",
        f"style-src {' '.join(hashes['style'])}", "connect-src 'self'", "img-src data:",
        "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'",
        "require-trusted-types-for 'script'", "trusted-types 'none'",
    )  # fmt: skip
    return "; ".join(rules)


_HTML = Path(__file__).with_name("index.html").read_text(encoding="utf-8")
_HEADERS = {
    "content-security-policy": content_security_policy(_HTML),
    "cache-control": "no-cache",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


async def _page(_: Request) -> Response:
    return Response(_HTML, headers=_HEADERS, media_type="text/html")


def add_page(app: Starlette) -> None:
    """Answer `GET /` with the page, whatever else the application mounts there.

    It asks `v1/nodes`, `v1/decisions`, `v1/tenants` and `v1/models` beside it, and leaves out what
    is not there (404).
    """
    app.router.routes.insert(0, Route("/", _page, methods=["GET"], include_in_schema=False))

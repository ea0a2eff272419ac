"""Every endpoint is known: docs/security.md names each with who may use it, and no other."""

import re
from pathlib import Path

import pytest

from router.api.app import OPERATOR_PATHS, make_app
from router.api.endpoints import ROUTES

pytestmark = pytest.mark.ray

DOCUMENT = Path(__file__).parents[2] / "docs" / "security.md"


def documented():
    text = DOCUMENT.read_text().split("## Endpoints")[1].split("\n## ")[0]
    return {
        (method, path): row.split("|")[2].strip()
        for row in text.splitlines()
        if row.startswith("| `")
        for method, path in re.findall(r"`(GET|POST) ([^`]+)`", row.split("|")[1])
    }


def served():
    app = make_app()
    for route in ROUTES.values():
        route(app)(lambda: None)
    return {
        (method, re.sub(r":path}", "}", route.path))
        for route in app.routes
        for method in route.methods - {"HEAD"}
    }


def test_the_document_names_every_endpoint_and_no_other():
    assert set(documented()) == served()


def test_what_the_document_calls_an_operators_is_guarded():
    said = {path for (_, path), who in documented().items() if who == "operators"}
    assert said == set(OPERATOR_PATHS)

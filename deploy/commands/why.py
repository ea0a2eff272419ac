"""`kappa why REQUEST_ID`: where one request's time went, as bars in the terminal.

Asks a running cluster for the request's account (`GET /v1/decisions/ID`): what was decided and
foreseen, what its worker reported, and its timeline. The id stands in every response
(`x-request-id`) and in every line of the log.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import quote

import httpx
import typer

from deploy.commands.console import ApiKey, Json, api_key, fail, print_json, print_text
from loadtest.client import bearer

_WIDTH = 48
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_TIMEOUT_S = 30.0
_WORDS = {
    "ingress": "whole request", "tokenize": "tokenize", "decide": "decide",
    "first_token": "to first token", "queue": "queue", "load": "load", "prefill": "prefill",
    "stream": "stream", "given_up": "given up",
}  # fmt: skip


def why(
    request_id: Annotated[str, typer.Argument(help="Its id: `x-request-id` of the response.")],
    url: Annotated[str, typer.Option(help="The cluster.")] = "http://127.0.0.1:8000",
    key: ApiKey = None,
    json_output: Json = False,
) -> None:
    """Tell where a request's time went."""
    account = _ask(url.rstrip("/"), request_id, key)
    if json_output:
        print_json(account)
    else:
        print_text("\n".join(picture(account)))


def _ask(url: str, request_id: str, given: str | None) -> dict[str, Any]:
    path = f"{url}/v1/decisions/{quote(request_id, safe='')}"
    try:
        answer = httpx.get(path, headers=bearer(api_key(given)), timeout=_TIMEOUT_S)
        account: dict[str, Any] = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        fail(f"{url} cannot be asked: {error}. Start one with `kappa serve`, or give --url")
    except ValueError:
        fail(f"{url} answered {answer.status_code} without JSON: is it a kappa-serve endpoint?")
    if answer.status_code != 200:
        fail(str((account.get("error") or {}).get("message") or f"{url}: {answer.status_code}"))
    return account


def picture(account: Mapping[str, Any], width: int = _WIDTH) -> list[str]:
    """A request's account in lines: what it was, a bar for each span, and a sentence."""
    timeline = account.get("timeline")
    lines = [_title(account), *_foreseen(account)]
    spans = list(timeline["spans"]) if timeline else []
    if not spans:
        known = "it is still under way" if timeline else "this ingress kept no timeline of it"
        return [*lines, f"no spans: {known}"]
    start_s, whole_s = spans[0]["start_s"], spans[0]["seconds"]
    for span in spans:
        offset = (span["start_s"] - start_s) / whole_s if whole_s > 0 else 0.0
        share = span["seconds"] / whole_s if whole_s > 0 else 0.0
        name = _depth(span) + _WORDS.get(span["name"], span["name"]) + "*" * span["derived"]
        tokens = span["attributes"].get("tokens")
        note = f"  {tokens:,} tokens" if isinstance(tokens, int) else ""
        where = span["attributes"].get("kappa.node")
        note += f"  on {where}" if where and span["name"] in ("first_token", "given_up") else ""
        lines.append(f"{name:<18} {_time(span['seconds']):>8} │{_bar(offset, share, width)}│{note}")
    if any(span["derived"] for span in spans):
        lines.append("* how long is the worker's measurement; when is derived")
    return [*lines, _sentence(account, spans)]


def _title(account: Mapping[str, Any]) -> str:
    paced = " (paced)" if account.get("paced") else ""
    node = f" on {account['node']}{paced}" if account.get("node") else ", no worker"
    timeline = account.get("timeline") or {}
    end = account.get("end") or timeline.get("end") or "under way"
    status = f", {timeline['status']}" if timeline.get("status") else ""
    tenant = f" of {account['tenant']}" if account.get("tenant") else ""
    return f"{account['request_id']}{tenant}{node}: {end}{status}"


def _foreseen(account: Mapping[str, Any]) -> list[str]:
    """What was decided and why, and how well it was foreseen."""
    if not account.get("node"):
        return []
    predicted, actual = account["predicted"], account["actual"]
    lines = [
        f"chosen by {account['policy']}: {account['reason']}; κ {account['ratio']:.3g}, "
        f"κ_crit {account['kappa_crit']:.3g}: {account['bound']}-bound"
    ]
    real_s = actual.get("ttft_s")
    if real_s is not None:
        parts = ", ".join(
            f"{part} {_time(predicted[key])} → {_time(actual[key])}"
            for part, key in (("queue", "queue_s"), ("load", "load_s"), ("compute", "compute_s"))
            if actual.get(key) is not None
        )
        lines.append(
            f"first token: predicted {_time(predicted['ttft_s'])}, real {_time(real_s)}"
            + (f" ({parts})" if parts else "")
        )
    shadow = account.get("shadow")
    if shadow:
        lines.append(
            f"steered by Ray's rule; ours would have taken {shadow['chosen_node']} "
            f"({_time(shadow['predicted_ttft_s'])} predicted)"
        )
    return lines


def _sentence(account: Mapping[str, Any], spans: list[dict[str, Any]]) -> str:
    """The longest part until the first token, in words."""
    inner = {span["parent"] for span in spans}
    parts = [s for s in spans[1:] if s["name"] not in inner and s["name"] != "stream"]
    if not parts:
        return "It ended before anything was done for it."
    longest = max(parts, key=lambda span: span["seconds"])
    total_s = sum(span["seconds"] for span in parts)
    share = longest["seconds"] / total_s if total_s > 0 else 0.0
    causes = {
        "tokenize": "reading its prompt", "decide": "the decision",
        "queue": "waiting for its node, or on the way there", "load": "loading its cached prefix",
        "prefill": "computing its new tokens",
        "first_token": "its node, which did not say on what",
        "given_up": "a worker that did not serve it",
    }  # fmt: skip
    before = "Until the first token" if account.get("actual", {}).get("ttft_s") else "In all"
    cause = causes.get(longest["name"], longest["name"])
    return f"{before}, {share:.0%} of {_time(total_s)} went to {cause}."


def _depth(span: Mapping[str, Any]) -> str:
    return {"": "", "ingress": "  "}.get(span["parent"], "    ")


def _bar(offset: float, share: float, width: int) -> str:
    """A bar of eighths of a cell, `width` cells wide in all; what lasted is never nothing."""
    start = min(max(int(offset * width), 0), width - 1)
    eighths = min(max(round(share * width * 8), 1), (width - start) * 8)
    whole, rest = divmod(eighths, 8)
    return (" " * start + "█" * whole + (_EIGHTHS[rest] if rest else "")).ljust(width)


def _time(seconds: float) -> str:
    if seconds < 0.9995e-3:
        return f"{1e6 * seconds:.0f} µs"
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"

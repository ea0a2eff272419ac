"""`kappa why REQUEST_ID`: where one request's time went, as bars in the terminal.

Fetches the request's account from a running cluster (`GET /v1/decisions/ID`): what was decided and
foreseen, what its worker reported, and its timeline. The id stands in every response
(`x-request-id`) and in every line of the log.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any
from urllib.parse import quote

import typer

from kappa_deploy.commands.console import ApiKey, Json, cluster_at, print_json, print_text, seconds
from kappa_router.console import fail

_WIDTH = 48
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_TIMEOUT_S = 30.0
_DEPTHS = {"": "", "decider": "  "}
# (name of a span, what it is called, what took the time if it was the longest)
_SPANS = {
    "decider": ("whole request", ""),
    "tokenize": ("tokenize", "reading its prompt"),
    "decide": ("decide", "the decision"),
    "first_token": ("to first token", "its node, which did not say on what"),
    "queue": ("queue", "waiting for its node, or on the way there"),
    "load": ("load", "loading its cached prefix"),
    "prefill": ("prefill", "computing its new tokens"),
    "stream": ("stream", ""),
    "given_up": ("given up", "a worker that did not serve it"),
}


def why(
    request_id: Annotated[str, typer.Argument(help="Its id: `x-request-id` of the response.")],
    url: Annotated[str, typer.Option(help="The cluster.")] = "http://127.0.0.1:8000",
    key: ApiKey = None,
    json_output: Json = False,
) -> None:
    """Show where a request's time went."""
    with cluster_at(url, key, _TIMEOUT_S) as client:
        answer = client.get(f"/v1/decisions/{quote(request_id, safe='')}")
        account: dict[str, Any] = answer.json()
    if answer.status_code != 200:
        fail(str((account.get("error") or {}).get("message") or f"{url}: {answer.status_code}"))
    if json_output:
        print_json(account)
    else:
        print_text("\n".join(picture(account)))


def picture(account: Mapping[str, Any], width: int = _WIDTH) -> Iterator[str]:
    """A request's account in lines: what it was, a bar for each span, and a sentence."""
    timeline = account.get("timeline") or {}
    paced = " (paced)" if account.get("paced") else ""
    node = f" on {account['node']}{paced}" if account.get("node") else ", no worker"
    end = account.get("end") or timeline.get("end") or "under way"
    status = f", {timeline['status']}" if timeline.get("status") else ""
    tenant = f" of {account['tenant']}" if account.get("tenant") else ""
    yield f"{account['request_id']}{tenant}{node}: {end}{status}"
    if account.get("node"):
        yield from _foreseen(account)
    spans = timeline.get("spans")
    if not spans:
        known = "it is still under way" if timeline else "this decider kept no timeline of it"
        yield f"no spans: {known}"
        return
    start_s, whole_s = spans[0]["start_s"], spans[0]["seconds"]
    for span in spans:
        offset = (span["start_s"] - start_s) / whole_s if whole_s > 0 else 0.0
        share = span["seconds"] / whole_s if whole_s > 0 else 0.0
        kind, facts = span["name"], span["attributes"]
        name = _DEPTHS.get(span["parent"], "    ") + _SPANS.get(kind, (kind, kind))[0]
        name += "*" * span["derived"]
        note = f"  {facts['tokens']:,} tokens" if isinstance(facts.get("tokens"), int) else ""
        if facts.get("kappa.node") and kind in ("first_token", "given_up"):
            note += f"  on {facts['kappa.node']}"
        yield f"{name:<18} {seconds(span['seconds']):>8} │{_bar(offset, share, width)}│{note}"
    if any(span["derived"] for span in spans):
        yield "* how long is the worker's measurement; when is derived"
    # The longest part until the first token, in words.
    inner = {span["parent"] for span in spans}
    parts = [s for s in spans[1:] if s["name"] not in inner and s["name"] != "stream"]
    if not parts:
        yield "It ended before anything was done for it."
        return
    longest = max(parts, key=lambda span: span["seconds"])
    total_s = sum(span["seconds"] for span in parts)
    share = longest["seconds"] / total_s if total_s > 0 else 0.0
    before = "Until the first token" if account.get("actual", {}).get("ttft_s") else "In all"
    cause = _SPANS.get(longest["name"], ("", longest["name"]))[1]
    yield f"{before}, {share:.0%} of {seconds(total_s)} went to {cause}."


def _foreseen(account: Mapping[str, Any]) -> Iterator[str]:
    """The decision, its reason, and how well it was predicted."""
    predicted, actual = account["predicted"], account["actual"]
    yield (
        f"chosen by {account['policy']}: {account['reason']}; κ {account['ratio']:.3g}, "
        f"κ_crit {account['kappa_crit']:.3g}: {account['bound']}-bound"
    )
    real_s = actual.get("ttft_s")
    if real_s is not None:
        parts = ", ".join(
            f"{part} {seconds(predicted[f'{part}_s'])} → {seconds(actual[f'{part}_s'])}"
            for part in ("queue", "load", "compute")
            if actual.get(f"{part}_s") is not None
        )
        whole = f"predicted {seconds(predicted['ttft_s'])}, real {seconds(real_s)}"
        yield f"first token: {whole} ({parts})" if parts else f"first token: {whole}"
    shadow = account.get("shadow")
    if shadow:
        who = "Ray's" if account["steered"] == "ray" else "the present balancer's"
        yield (
            f"steered by {who} rule; ours would have taken {shadow['chosen_node']} "
            f"({seconds(shadow['predicted_ttft_s'])} predicted)"
        )


def _bar(offset: float, share: float, width: int) -> str:
    """A bar of eighths of a cell, `width` cells wide in all; even the shortest span shows."""
    start = min(max(int(offset * width), 0), width - 1)
    eighths = min(max(round(share * width * 8), 1), (width - start) * 8)
    whole, rest = divmod(eighths, 8)
    return (" " * start + "█" * whole + (_EIGHTHS[rest] if rest else "")).ljust(width)

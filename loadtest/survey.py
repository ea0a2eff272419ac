"""Asks an endpoint what it is before a load test: models, nodes, what options it takes.

Nothing is generated. vLLM, SGLang and clusters of ours are told by what they say of themselves; an
endpoint that is none of these gets plain OpenAI requests. Called by `kappa replay`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from loadtest.client import PROBE_S, EndpointError, base_url, detail_of

_EOS_OWNERS = ("vllm", "sglang")


@dataclass(frozen=True, slots=True)
class Surveyed:
    """What an endpoint told of itself: its models and the contexts of those for which it says one,
    its nodes if it is a cluster of ours (else none), and whether it is known to take `ignore_eos`,
    which those take that take token ids."""

    models: tuple[str, ...]
    contexts: dict[str, int]
    nodes: tuple[dict[str, Any], ...]
    takes_ignore_eos: bool


async def survey(url: str, key: str = "") -> Surveyed:
    """Ask an endpoint what it is, without generating anything.

    Raises:
        EndpointError: nobody answers, the key is refused, or it serves no model.
    """
    base = base_url(url)
    headers = {"authorization": f"Bearer {key}"} if key else None
    async with aiohttp.ClientSession(
        headers=headers, timeout=aiohttp.ClientTimeout(total=PROBE_S)
    ) as session:
        try:
            async with session.get(f"{base}/v1/models") as response:
                if response.status != 200:
                    hint = "; give its key with --key" if response.status in (401, 403) else ""
                    raise EndpointError(
                        f"{base}/v1/models answers {response.status}{hint}. Nothing was sent; "
                        "with --model NAME requests are sent all the same"
                    )
                cards = msgspec.json.decode(await response.read(), type=_Models).data
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EndpointError(
                f"nobody answers at {base}: {detail_of(error)}. Nothing was sent; with --model "
                "NAME requests are sent all the same, and counted as failed"
            ) from None
        except msgspec.DecodeError as error:
            raise EndpointError(
                f"{base}/v1/models is not what OpenAI's endpoints answer: {error}"
            ) from None
        if not cards:
            raise EndpointError(f"{base} serves no model")
        rows = (await _told(session, f"{base}/v1/nodes")).get("nodes")
        is_ours = isinstance(rows, list) and all(isinstance(row, dict) for row in rows)
        nodes = tuple(rows or ()) if is_ours else ()
        takes = bool(nodes) or any(card.owned_by in _EOS_OWNERS for card in cards)
        takes = takes or "version" in await _told(session, f"{base}/version")
        contexts = {c.id: c.max_model_len for c in cards if isinstance(c.max_model_len, int)}
        return Surveyed(tuple(card.id for card in cards), contexts, nodes, takes)


class _Card(msgspec.Struct):
    id: str
    owned_by: Any = None
    max_model_len: Any = None


class _Models(msgspec.Struct):
    data: list[_Card]


async def _told(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """The JSON object at `url`; empty if there is none."""
    try:
        async with session.get(url) as response:
            if response.status != 200:
                return {}
            told = msgspec.json.decode(await response.read())
    except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError):
        return {}
    return told if isinstance(told, dict) else {}

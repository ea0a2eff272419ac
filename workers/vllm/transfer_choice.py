"""How a worker hands KV over, as the settings say, put into its engine's arguments. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from kappa.model import kv_bytes_per_token
from workers.vllm.arguments import Pace

FILES, NIXL = "files", "nixl"
TRANSFER_KEY = "kappa_transfer"
"""In our connector's extra configuration: folder, most_bytes, wait_s, token_s, fixed_s."""


class Takes(Protocol):
    """What brings KV from other workers, as the metered worker asks for it."""

    def wait_for_load(self, timeout_s: float) -> bool:
        """Sleep until something has come, at most `timeout_s`; False when nothing is on its way."""

    def take_load_s(self, request_id: str) -> float:
        """Seconds that a request's KV took to come; forgets them."""


TAKES: list[Takes] = []
"""Those of this process."""


@dataclass(frozen=True, slots=True)
class TransferChoice:
    """Fields as in `kappa.settings.engine`."""

    connector: str
    folder: str
    most_bytes: int
    wait_s: float
    net_bytes_per_s: float
    fixed_s: float


def transfer_on(choice: TransferChoice, arguments: dict[str, Any], pace: Pace | None) -> None:
    """Have the engine give and take whole prompts; `arguments` are vLLM's, changed in place.

    Raises:
        ValueError: it has no connector to build on, or a kind that there is not.
    """
    config = arguments.get("kv_transfer_config")
    if config is None:
        raise ValueError("a worker that hands KV over needs a host tier: give engine.host_bytes")
    if choice.connector == FILES:
        told: dict[str, Any] = {
            "folder": choice.folder, "most_bytes": choice.most_bytes, "wait_s": choice.wait_s,
        }  # fmt: skip
        if pace is not None:
            dilation, kv_bytes = pace.node.dilation, kv_bytes_per_token(pace.shape)
            told["token_s"] = dilation * kv_bytes / choice.net_bytes_per_s
            told["fixed_s"] = dilation * choice.fixed_s
        config["kv_connector"] = "TransferConnector"
        config["kv_connector_module_path"] = "workers.vllm.transfer"
        config["kv_connector_extra_config"][TRANSFER_KEY] = told
        return
    if choice.connector != NIXL:
        raise ValueError(f"transfer connector {choice.connector!r}: choose {FILES} or {NIXL}")
    # vLLM's own: the first that holds something loads, and both store.
    nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    arguments["kv_transfer_config"] = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [nixl, config]},
    }

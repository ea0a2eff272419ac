"""How the KV of a prompt gets from a prefill worker to the worker that decodes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from kappa.settings.base import Finite, Section


class TransferSettings(Section):
    """Used where a pool's role is `prefill`; without such a pool nothing is handed over."""

    connector: Literal["files", "nixl"] = Field(
        "files", description="files: shared memory of one machine; nixl: vLLM's, between machines"
    )
    folder: str = Field("/dev/shm/kappa-transfer", description="of the files, for one user")
    most_bytes: int = Field(1 << 30, ge=1 << 20, description="bound of all files together")
    wait_s: Finite = Field(
        5.0, gt=0, description="blocks that do not come in so long are computed again"
    )
    net_bytes_per_s: Finite = Field(
        12.5e9, gt=0, description="of the network: what the router prices, and paced workers wait"
    )
    fixed_s: Finite = Field(0.001, ge=0, description="seconds of a transfer besides its bytes")
    min_new_tokens: int = Field(
        256, ge=1, description="prompts with fewer tokens to compute are not worth handing over"
    )

    @field_validator("folder")
    @classmethod
    def _whole_path(cls, value: str) -> str:
        if not value.startswith("/"):
            raise ValueError(
                f"{value!r} is no whole path: workers have working folders of their own"
            )
        return value

"""How engines of kind torch decode approximately, where `engine.approx` lets them (paper 004).

The section `engine.sparse` of a cluster file: the method's numbers, the lanes of each engine, and a
file of head importance. What they mean: docs/sparse.md.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from kappa.settings.base import Finite, Section

ApproxName = Literal["never", "ask", "always"]


class SparseSection(Section):
    """Sparse decoding: each head attends to sinks, recent tokens and a choice of the rest, which it
    keeps until its query has moved too far. Changes answers."""

    share: Finite = Field(0.1, gt=0, le=1, description="of the context's tokens, those chosen")
    sink_tokens: int = Field(4, ge=0, le=1024, description="first tokens, always attended to")
    recent_tokens: int = Field(64, ge=1, le=65536, description="latest tokens, always attended to")
    eta: Finite = Field(
        0.8, ge=-1, le=1, description="cosine below which the most important head chooses anew"
    )
    power: Finite = Field(
        3.0, gt=0, le=100, description="the higher, the fewer heads are held to eta"
    )
    epsilon: Finite = Field(
        0.1, ge=0, le=2, description="margin on a head's measured cosine before it counts as hard"
    )
    retriever: Literal["hash", "oracle"] = Field(
        "hash", description="hash: by codes on the device; oracle: by all keys, which it loads"
    )
    code_bits: int = Field(256, ge=64, le=4096, description="of a key's code, in multiples of 64")
    prefetch: bool = Field(
        True, description="choose one layer ahead by a predicted query; else wait for the choice"
    )
    max_age: int = Field(0, ge=0, description="steps after which a choice is made anew; 0: never")
    lanes: int = Field(4, ge=1, le=4096, description="requests that decode so at a time")
    chunk_tokens: int = Field(
        64, ge=1, le=4096, description="new tokens at a time behind a prefix that is not loaded"
    )
    heads: str | None = Field(
        None, description="file of head importance (JSON); none: all heads count alike"
    )
    persistent_heads: int | None = Field(
        None, ge=0, description="KV heads, over all layers, whose KV may stay on the device; none: "
        "as many as are hard to reuse",
    )  # fmt: skip

    @model_validator(mode="after")
    def _whole_words(self) -> SparseSection:
        if self.code_bits % 64:
            raise ValueError(f"code_bits is {self.code_bits}: give a multiple of 64")
        return self

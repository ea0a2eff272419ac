"""How an engine decodes sparsely: plain, validated data beside the method's own numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kappa.plans.clo import CloConfig


@dataclass(frozen=True, slots=True)
class SparseSettings:
    """Settings of one engine's sparse decoding.

    clo: the numbers of paper 004. slots: sequences that decode sparsely at a time; max_tokens: of
    each at most. retriever: "oracle" scores keys themselves, "hash" their codes. prefetch: with the
    query as the layer before predicts it, one layer ahead; else with the actual one, waited for.
    max_age: steps after which a choice is made anew whatever its similarity; 0: never (the paper's
    way). chunk_tokens: new tokens computed together behind a prefix that stays in host memory.
    """

    clo: CloConfig = field(default_factory=CloConfig)
    slots: int = 4
    max_tokens: int = 8192
    retriever: Literal["oracle", "hash"] = "hash"
    prefetch: bool = True
    max_age: int = 0
    chunk_tokens: int = 128

    def __post_init__(self) -> None:
        for name, least in {"slots": 1, "max_tokens": 1, "chunk_tokens": 1, "max_age": 0}.items():
            if (value := getattr(self, name)) < least:
                raise ValueError(f"SparseSettings.{name} is {value}: give {least} or more")
        if self.retriever not in ("oracle", "hash"):
            raise ValueError(
                f"SparseSettings.retriever is {self.retriever!r}: choose oracle or hash"
            )
        if self.retriever == "hash" and not self.clo.code_bits:
            raise ValueError("SparseSettings.retriever is 'hash' with code_bits 0: give some bits")

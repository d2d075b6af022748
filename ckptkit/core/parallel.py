"""The sizes by which ranks share a model's weights."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Tensor, pipeline and expert parallel sizes; `etp` is the tensor parallel size inside experts."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1

    def __str__(self) -> str:
        return f"TP{self.tp} PP{self.pp} EP{self.ep} ETP{self.etp}"

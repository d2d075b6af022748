"""Engines of SGLang, as a check of weight updates asks them: by HTTP.

Source: SGLang 0.5.16, `srt/utils/weight_checker.py` and `srt/managers/mm_utils.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version as installed
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ckptkit.core.errors import CkptkitError, MissingDependencyError
from ckptkit.verify.weight_sync.engines import Digest, EngineState, JsonServer, Seat, Setup

if TYPE_CHECKING:
    from torch import Tensor

_SEAT = ("tp_rank", "tp_size", "dp_rank", "dp_size", "pp_rank", "pp_size")
# Arguments of a server that decide how it keeps weights; engines that have them alike keep them alike.
_LAYOUT = (
    *("tp_size", "pp_size", "dp_size", "ep_size", "enable_dp_attention", "quantization", "dtype", "device"),
    *("moe_runner_backend", "moe_dense_tp_size", "disable_shared_experts_fusion", "speculative_algorithm"),
)


@dataclass(frozen=True)
class SglangEngine:
    """One engine, and not a router before it."""

    server: JsonServer

    @property
    def name(self) -> str:
        """Its address."""
        return self.server.url

    def setup(self) -> Setup:
        """How it was started (`/server_info`)."""
        found = self.server.require("server_info")
        layout = tuple((name, str(found.get(name))) for name in _LAYOUT)
        tp = found.get("tp_size")
        if not isinstance(tp, int) or tp < 1:
            raise CkptkitError(
                f"{self.name}/server_info names no tp_size", "is this an engine of SGLang, or the router before it?"
            )
        return Setup(str(found.get("version")), (tp,), found.get("quantization") is not None, layout, dequantizes=True)

    def state(self, setup: Setup) -> EngineState:
        """Its weight version (`/model_info`) and its ranks' checksums (`/weights_checker`)."""
        version = self.server.require("model_info").get("weight_version")
        answer = self.server.require("weights_checker", {"action": "checksum"})
        ranks = answer.get("ranks")
        if not answer.get("success") or not ranks:
            message = "no checksums in its answer" if answer.get("success") else answer.get("message")
            raise CkptkitError(
                f"{self.name}/weights_checker: {message}", "it needs an SGLang that knows the action `checksum`"
            )
        found = dict[Seat, dict[str, str]]()
        for rank in ranks:
            info = rank["parallelism_info"]
            first = info[0] if isinstance(info, list) else info  # a list, in later releases with the draft model's too
            found[tuple(int(first[name]) for name in _SEAT)] = dict(rank["checksums"])
        # Every tensor parallel rank beside those that answered.
        if lost := sorted({(rank, *seat[1:]) for seat in found for rank in range(seat[1])} - set(found)):
            names = ", ".join(f"tensor parallel rank {seat[0]}" for seat in lost)
            raise CkptkitError(f"{self.name}/weights_checker did not answer for {names}", "is the engine whole?")
        return EngineState(str(version), found)


def sglang_digest() -> Digest:
    """SGLang's own function for the checksum of a tensor, on a GPU where there is one: it gives another on a CPU."""
    if find_spec("sglang") is None:
        raise MissingDependencyError(
            "SGLang is not installed here, and its checksums are needed", "install the engines' SGLang"
        )
    import torch
    from sglang.srt.managers.mm_utils import tensor_hash

    cuda = torch.cuda.is_available()

    def digest(tensor: Tensor) -> str:
        return f"{tensor_hash(tensor.cuda() if cuda else tensor):016x}"

    return digest


def computes_as(version: str) -> bool:
    """Whether an engine of this version computes checksums as SGLang does here, as far as versions tell."""
    return find_spec("sglang") is None or version == installed("sglang")

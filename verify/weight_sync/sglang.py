"""Asks engines of SGLang for their weights (0.5.16, `srt/utils/weight_checker.py`, `srt/managers/mm_utils.py`)."""

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
_LAYOUT = (  # arguments of a server that decide how it keeps weights
    *("tp_size", "pp_size", "dp_size", "ep_size", "enable_dp_attention", "quantization", "dtype", "device"),
    *("moe_runner_backend", "moe_dense_tp_size", "disable_shared_experts_fusion", "speculative_algorithm"),
)


@dataclass(frozen=True)
class SglangEngine:
    """One engine, not a router."""

    name: str
    server: JsonServer

    def setup(self) -> Setup:
        """Its settings (`/server_info`)."""
        info = self.server.require("server_info")
        layout = tuple((name, str(info.get(name))) for name in _LAYOUT)
        tp = info.get("tp_size")
        if not isinstance(tp, int) or tp < 1:
            hint = "pass the address of an SGLang engine, not of a router"
            raise CkptkitError(f"{self.name}/server_info has no tp_size", hint)
        return Setup(str(info.get("version")), (tp,), info.get("quantization") is not None, layout, dequantizes=True)

    def state(self, setup: Setup) -> EngineState:
        """Its weight version (`/model_info`) and its ranks' checksums (`/weights_checker`)."""
        version = self.server.require("model_info").get("weight_version")
        answer = self.server.require("weights_checker", {"action": "checksum"})
        ranks = answer.get("ranks")
        if not answer.get("success") or not ranks:
            message = "the answer has no checksums" if answer.get("success") else answer.get("message")
            raise CkptkitError(f"{self.name}/weights_checker: {message}", "use an SGLang with the action `checksum`")
        seats = dict[Seat, dict[str, str]]()
        for rank in ranks:
            info = rank["parallelism_info"]
            first = info[0] if isinstance(info, list) else info  # later releases list the draft model's after it
            seats[tuple(int(first[name]) for name in _SEAT)] = dict(rank["checksums"])
        if lost := sorted({(rank, *seat[1:]) for seat in seats for rank in range(seat[1])} - set(seats)):
            names = ", ".join(f"tensor parallel rank {seat[0]}" for seat in lost)
            hint = "check that all ranks of the engine are running"
            raise CkptkitError(f"{self.name}/weights_checker did not answer for {names}", hint)
        return EngineState(str(version), seats)


def sglang_digest() -> Digest:
    """SGLang's own checksum of a tensor, on a GPU if there is one: it differs on a CPU."""
    if find_spec("sglang") is None:
        message = "SGLang, which computes the checksums, is not installed here"
        raise MissingDependencyError(message, "install the SGLang release of the engines")
    import torch
    from sglang.srt.managers.mm_utils import tensor_hash

    cuda = torch.cuda.is_available()

    def digest(tensor: Tensor) -> str:
        return f"{tensor_hash(tensor.cuda() if cuda else tensor):016x}"

    return digest


def computes_as(version: str) -> bool:
    """Whether an engine of this version computes checksums like the installed SGLang, judging by the version."""
    return find_spec("sglang") is None or version == installed("sglang")

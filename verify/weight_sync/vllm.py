"""Asks engines of vLLM for their weights, by HTTP or by a `collective_rpc`.

From 0.32 on vLLM answers `POST /weight_checker`; older releases need `ckptkit.hooks_vllm.WeightReader`. Source: 0.33.0,
`entrypoints/rl/online/api_router.py`, `v1/worker/gpu_worker.py`, `model_executor/model_loader/weight_checksum.py`.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any

from ckptkit.core.errors import CkptkitError, words_of
from ckptkit.verify.weight_sync.engines import EngineState, JsonServer, Seat, Setup
from ckptkit.verify.weight_sync.messages import waiting

if TYPE_CHECKING:
    from torch import Tensor

# vLLM's `collective_rpc`: takes the name of a worker's method, returns the answer of each worker.
Rpc = Callable[[str], Sequence[Any]]
SETUP, WEIGHTS = "ckptkit_setup", "ckptkit_weights"  # methods of `WeightReader`
READER = "ckptkit.hooks_vllm.WeightReader"
_KEY = re.compile(r"dp(\d+):pp(\d+):pcp(\d+):tp(\d+):(.+)")
_SIZES = ("tensor", "data", "pipeline", "prefill_context")  # as `engines._PLACES`
_LAYOUT = {  # further settings that decide how an engine keeps weights
    "parallel_config": ("enable_expert_parallel", "enable_eplb", "expert_placement_strategy"),
    "model_config": ("quantization", "dtype"),
    "kernel_config": ("moe_backend",),
}
_NEVER_SET = "default"  # vLLM's weight version until a trainer sets one
_CHUNK = 1 << 22  # words: intermediate results of 32 MiB fit into a GPU's cache
# The golden ratio's bits and the factors of splitmix64: odd, so that a product modulo 2^64 is invertible.
_PLACE, _FIRST, _SECOND = (one - (1 << 64) for one in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def vllm_digest(tensor: Tensor) -> str:
    """SHA-256 of the bytes in row-major order, as vLLM's own checker computes it."""
    import torch

    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy()).hexdigest()  # type: ignore[arg-type]


def device_digest(tensor: Tensor) -> str:
    """64 bits: the sum of all words of 8 bytes in row-major order, each mixed with its index as in splitmix64."""
    return checksums_of([device_sum(tensor)])[0]


def checksums_of(sums: Sequence[Tensor]) -> list[str]:
    """Hexadecimal checksums from results of `device_sum`, with one wait for all of them."""
    import torch

    return [f"{total % (1 << 64):016x}" for total in torch.cat(list(sums)).tolist()] if sums else []


def device_sum(tensor: Tensor) -> Tensor:
    """The sum of `device_digest` as int64 [1] on the device, without waiting for it."""
    import torch

    data = tensor.detach().cuda() if torch.cuda.is_available() else tensor.detach()
    data = data.contiguous().view(-1).view(torch.uint8)
    if data.numel() % 8:
        data = torch.nn.functional.pad(data, (0, -data.numel() % 8))
    elif data.storage_offset() % 8:
        data = data.clone()
    words, total = data.view(torch.int64), torch.full((1,), tensor.nbytes, device=data.device)
    if words.is_cuda and len(words):
        from ckptkit.verify.weight_sync.triton_digest import add_words

        add_words(total, words, (_PLACE, _FIRST, _SECOND))
        return total
    for start in range(0, len(words), _CHUNK):
        part = words[start : start + _CHUNK]
        mixed = torch.arange(start, start + len(part), device=data.device)
        mixed.mul_(_PLACE).bitwise_xor_(part).mul_(_FIRST)
        mixed.bitwise_xor_(mixed >> 27).mul_(_SECOND)
        total += mixed.bitwise_xor_(mixed >> 31).sum()
    return total


@dataclass(frozen=True)
class VllmEngine:
    """One engine: a server's address in development mode (VLLM_SERVER_DEV_MODE=1), or its `collective_rpc`."""

    name: str
    server: JsonServer | None
    rpc: Rpc | None = None

    def setup(self) -> Setup:
        """Its settings, by `/server_info` or `WeightReader`."""
        config = self._config()
        parallel = config.get("parallel_config", {})
        names = [f"{name}_parallel_size" for name in _SIZES]
        sizes = tuple(int(parallel.get(name, 1)) for name in names)
        layout = [(name, str(size)) for name, size in zip(names, sizes, strict=True)]
        layout += [(name, str(config.get(part, {}).get(name))) for part, names in _LAYOUT.items() for name in names]
        quantizes = config.get("model_config", {}).get("quantization") is not None
        # `/weight_checker` came with 0.32, as did this request, which costs nothing.
        has_checker = self.server is not None and self.server.ask("weight_info", may_lack=True) is not None
        return Setup("", sizes, quantizes, tuple(layout), digest=None if has_checker else device_digest)

    def state(self, setup: Setup) -> EngineState:
        """Its weight version (`/weight_info`), if any, and its ranks' checksums."""
        info = None if self.server is None else self.server.ask("weight_info", may_lack=True)
        version = info.get("weight_version") if info else None
        seats: dict[Seat, dict[str, str]] = defaultdict(dict)
        if setup.digest is None and self.server is not None:
            checksums = self.server.require("weight_checker", {"action": "checksum"})["checksums"]
        else:
            checksums = {key: checksum for rank in self._call(WEIGHTS) for key, checksum in rank.items()}
        for key, checksum in checksums.items():
            if (match := _KEY.fullmatch(key)) is None:
                raise CkptkitError(f"{self.name} has an unknown checksum {key!r:.80}", "report the release of vLLM")
            dp, pp, pcp, tp = map(int, match.groups()[:4])
            seat = tuple(chain.from_iterable(zip((tp, dp, pp, pcp), setup.sizes, strict=True)))
            seats[seat][match[5]] = str(checksum)
        if len(seats) != prod(setup.sizes):
            message = f"{self.name} answered for {len(seats)} of its {prod(setup.sizes)} ranks"
            raise CkptkitError(message, "pass the address of each data parallel engine")
        return EngineState(None if version == _NEVER_SET else version, seats)

    def _config(self) -> Mapping[str, Any]:
        if self.server is None:
            return self._call(SETUP)[0]
        config = self.server.require("server_info?config_format=json").get("vllm_config")
        if not isinstance(config, Mapping):
            raise CkptkitError(f"{self.name}/server_info has no vllm_config", "use vLLM 0.25 or later")
        return config

    def _call(self, method: str) -> Sequence[Mapping[str, Any]]:
        hint = f"before vLLM 0.32, start the engine with --worker-extension-cls {READER}, and ckptkit on its PYTHONPATH"
        try:
            with waiting(f"{method} of {self.name}"):
                if self.server is not None:
                    answers: Sequence[Any] = self.server.require("collective_rpc", {"method": method})["results"]
                else:
                    answers = self.rpc(method) if self.rpc else []
        except CkptkitError as error:
            raise CkptkitError(error.message, f"{error.hint}; {hint}") from error
        except (AttributeError, NotImplementedError) as error:
            raise CkptkitError(f"{self.name}: {words_of(error)}", hint) from error
        if not answers or not all(isinstance(one, Mapping) for one in answers):
            raise CkptkitError(f"{self.name} answered {method} without a mapping for each worker", hint)
        return answers

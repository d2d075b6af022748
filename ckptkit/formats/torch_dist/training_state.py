"""Describes the training state next to the weights from headers: optimizer, random states, scheduler.

Source of the keys: megatron-core `optimizer/distrib_optimizer.py` (`sharded_state_dict`), `optimizer/optimizer.py`
(`Float16OptimizerWithFloat16Params`, `ChainedOptimizer`) and `dist_checkpointing/optimizer.py`, and Megatron-LM
`training/checkpointing.py`.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptkit.core.dtypes import ITEMSIZE
from ckptkit.formats.torch_dist.reader import CALIBRATION, NOT_WEIGHTS, StoredMetadata, StoredTensor

if TYPE_CHECKING:
    from torch import Tensor


OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.(.+)")
STATE = re.compile(r"state\.([a-z0-9_]+)\.(.+)")
BUCKET = re.compile(r"distributed\.dp_group_idx_\d+\.gbuf_idx_\d+\.dtype_\(torch\.(\w+), .+\)\.bucket_idx_\d+\.(.+)")
# torch_dcp: state by the number of a parameter, and float32 copies by group and position.
NUMBERED = re.compile(r"optimizer\.state\.(\d+)\.(?!step$)([a-z0-9_]+)")
NUMBERED_MASTER = re.compile(r"fp32_from_fp16_params\.(\d+)\.(\d+)")
WHOLE = re.compile(r"distributed\.dp_group_idx_\d+\.param_state(/.*)?")
# Kinds of the float32 copies that the optimizer updates, in a distributed optimizer and in others.
MASTERS = ("param", "fp32_param")
# Tensors of a model without optimizer state.
_BUFFER = re.compile(r".*\.(?:expert_bias|local_tokens_per_expert)")
# The alignment of parameters in a bucket, in elements (megatron-core `param_and_grad_buffer.py`).
_ALIGNED = 64

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Bucket:
    """State of consecutive parameters without names; `dtype` is that of the parameters."""

    key: str
    dtype: str
    kinds: Mapping[str, StoredTensor]


@dataclass(frozen=True)
class OptimizerState:
    """Optimizer state by kind (`exp_avg`), for each key of weights or each bucket of a data parallel group.

    `unknown`: keys of state without their weight. `opaque`: objects with the complete state.
    """

    weights: Mapping[str, StoredTensor]
    by_weight: Mapping[str, Mapping[str, StoredTensor]]
    buckets: tuple[Bucket, ...]
    unknown: tuple[str, ...]
    opaque: tuple[str, ...]

    @property
    def is_empty(self) -> bool:
        return not (self.by_weight or self.buckets or self.unknown or self.opaque)


def optimizer_state(metadata: StoredMetadata) -> OptimizerState:
    """The optimizer state in `.metadata`. The weights exclude buffers, which have none."""
    weights = {
        key: stored
        for key, stored in metadata.tensors.items()
        if not NOT_WEIGHTS.fullmatch(key) and not _BUFFER.fullmatch(key)
    }
    by_weight: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
    buckets: dict[tuple[str, str], dict[str, StoredTensor]] = defaultdict(dict)
    unknown = []
    for key, stored in metadata.tensors.items():
        if not (found := OPTIMIZER.fullmatch(key)):
            continue
        if state := STATE.fullmatch(found[2]):
            if state[2] in weights:
                by_weight[state[2]][state[1]] = stored
            else:
                unknown.append(key)
        elif bucket := BUCKET.fullmatch(found[2]):
            buckets[key.removesuffix(f".{bucket[2]}"), bucket[1]][bucket[2]] = stored
    opaque = tuple(key for key in metadata.objects if (found := OPTIMIZER.fullmatch(key)) and WHOLE.fullmatch(found[2]))
    made = [Bucket(key, dtype, kinds) for (key, dtype), kinds in buckets.items()] + _numbered(metadata, weights)
    return OptimizerState(weights, dict(by_weight), tuple(made), tuple(unknown), opaque)


def _numbered(metadata: StoredMetadata, weights: Mapping[str, StoredTensor]) -> list[Bucket]:
    """State by the number of a parameter, as one bucket each. Groups are consecutive in both numberings."""
    kinds: dict[int, dict[str, StoredTensor]] = defaultdict(dict)
    masters: dict[tuple[int, int], StoredTensor] = {}
    for key, stored in metadata.tensors.items():
        name = key.removeprefix("optimizer.")
        if state := NUMBERED.fullmatch(name):
            kinds[int(state[1])][state[2]] = stored
        elif master := NUMBERED_MASTER.fullmatch(name):
            masters[int(master[1]), int(master[2])] = stored
    if len(masters) == len(kinds):
        for number, place in zip(sorted(kinds), sorted(masters), strict=True):
            kinds[number]["fp32_param"] = masters[place]
    dtypes = {stored.dtype for stored in weights.values()}
    dtype = dtypes.pop() if len(dtypes) == 1 else "several"
    return [Bucket(f"optimizer.optimizer.state.{number}", dtype, found) for number, found in sorted(kinds.items())]


def is_flattened(weight: Shape, state: Shape) -> bool:
    """Whether this is the shape of a weight's state with flattened parts.

    megatron-core up to 0.15 (`fully_sharded_model_space`) stores a weight [X, Y] in parts [x, y] as [X/x, Y/y, x*y].
    """
    *grid, elements = state if state else (0,)
    if len(grid) != len(weight) or any(not count or size % count for size, count in zip(weight, grid, strict=True)):
        return False
    return elements * math.prod(grid) == math.prod(weight)


def unflatten(state: Tensor, weight: Shape) -> Tensor:
    """Such state in the shape of its weight."""
    grid = state.shape[:-1]
    inner = [size // count for size, count in zip(weight, grid, strict=True)]
    axes = [axis for pair in zip(range(len(grid)), range(len(grid), 2 * len(grid)), strict=True) for axis in pair]
    return state.reshape(*grid, *inner).permute(axes).reshape(weight)


def is_padding(offset: int, elements: int) -> bool:
    """Whether a chunk of a bucket may be padding between two parameters (or a few shared elements)."""
    return offset % _ALIGNED != 0 and elements < _ALIGNED


_OTHERS = {"rng_state": "random states", "rerun_state_machine": "rerun state machine"}
# Formats with names of parameters look alike on disk; content_metadata distinguishes them.
_BY_PARAMETER, _BY_NUMBER = "by parameter", "by number"
LEFT_OUT = "convert does not copy this state"
_CALIBRATION = "ModelOpt's calibration (_amax of its quantizers)"


def training_state(metadata: StoredMetadata, common: Mapping[str, Any]) -> dict[str, Any]:
    """The training state next to the weights, with sizes in bytes, or empty if there is none.

    `optimizer`: bytes of each kind of state (`exp_avg`), numbers of parameters (with padding in buckets), bytes of
    experts if known, chained optimizers, and the format, by Megatron's name in `content_metadata` if present.
    `scheduler`: its values.
    """
    found: dict[str, Any] = {}
    if optimizer := _optimizer(metadata, common):
        found["optimizer"] = optimizer
    for prefix, name in _OTHERS.items():
        sizes = [blob.length for key, blob in metadata.objects.items() if key.startswith(prefix)]
        if sizes:
            found[name] = {"objects": len(sizes), "bytes": sum(sizes)}
    if calibration := [stored for key, stored in metadata.tensors.items() if CALIBRATION.fullmatch(key)]:
        nbytes = sum(math.prod(stored.shape) * ITEMSIZE[stored.dtype] for stored in calibration)
        found[_CALIBRATION] = {"tensors": len(calibration), "bytes": nbytes}
    scheduler = common.get("opt_param_scheduler")
    if isinstance(scheduler, Mapping):
        found["scheduler"] = {key: value for key, value in scheduler.items() if isinstance(value, (int, float, str))}
    return found


def _optimizer(metadata: StoredMetadata, common: Mapping[str, Any]) -> dict[str, Any]:
    kinds, parameters = Counter[str](), Counter[str]()
    experts, chained, formats = 0, set(), set()
    for key, nbytes, elements in _sizes(metadata):
        if not (match := OPTIMIZER.fullmatch(key)):
            continue
        chained.add(match[1])
        kind, layout = _kind(match[2])
        formats |= {layout} if layout else set()
        kinds[kind] += nbytes
        parameters[kind] += elements if layout else 0
        experts += nbytes if ".experts.experts." in key else 0
    if not kinds:
        return {}
    stored = common.get("content_metadata")
    name = stored.get("distrib_optim_sharding_type") if isinstance(stored, Mapping) else None
    facts: dict[str, Any] = {"bytes": sum(kinds.values()), "state": dict(sorted(kinds.items()))}
    facts["parameters"] = {kind: count for kind, count in sorted(parameters.items()) if count}
    facts["format"] = name if isinstance(name, str) else ", ".join(sorted(formats)) or "unknown"
    if experts:
        facts["bytes of experts"] = experts
    if prefixes := sorted(prefix.rstrip(".") for prefix in chained if prefix):
        facts["chained"] = prefixes
    return facts


def _sizes(metadata: StoredMetadata) -> Iterator[tuple[str, int, int]]:
    """Key, bytes and elements of every tensor's chunks, and key and bytes of every object."""
    for key, stored in metadata.tensors.items():
        elements = sum(math.prod(chunk.sizes) for chunk in stored.chunks)
        yield key, elements * ITEMSIZE[stored.dtype], elements
    for key, blob in metadata.objects.items():
        yield key, blob.length, 0


def _kind(rest: str) -> tuple[str, str | None]:
    """The kind of state of an optimizer's key, and the format with such keys, or None if unknown."""
    if match := STATE.fullmatch(rest):
        return match[1], _BY_PARAMETER
    if match := BUCKET.fullmatch(rest):
        return match[2], "dp_reshardable"
    if match := NUMBERED.fullmatch(rest):
        return match[2], _BY_NUMBER
    if NUMBERED_MASTER.fullmatch(rest):
        return "fp32_param", _BY_NUMBER
    if WHOLE.fullmatch(rest):
        return "param_state", "dp_zero_gather_scatter"
    return "settings", None


def calibration_note(state: Mapping[str, Any]) -> list[str]:
    """A note on a conversion without ModelOpt's calibration, or empty if there is none."""
    if (found := state.get(_CALIBRATION)) is None:
        return []
    return [f"convert omits {found['tensors']} tensors of {_CALIBRATION}: the weights themselves are not quantized"]


def describe_state(state: Mapping[str, Any]) -> str | None:
    """One line on the training state with its bytes, which `convert` leaves out, or None if there is none."""
    if not state:
        return None
    parts = []
    if optimizer := state.get("optimizer"):
        of = {kind: f" of {count} parameters" for kind, count in optimizer["parameters"].items()}
        kinds = ", ".join(f"{kind} {nbytes}{of.get(kind, '')}" for kind, nbytes in optimizer["state"].items())
        parts.append(f"optimizer ({optimizer['format']}) {optimizer['bytes']} bytes: {kinds}")
    parts += [f"{name} {one['bytes']} bytes" for name, one in state.items() if name not in ("optimizer", "scheduler")]
    parts += ["scheduler"] if "scheduler" in state else []
    return f"{'; '.join(parts)}; {LEFT_OUT}"

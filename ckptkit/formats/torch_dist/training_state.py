"""What a training run saved beside the weights: optimizer, random states, scheduler. From headers alone.

Source of the keys: as of `optimizer.py`, and Megatron-LM `training/checkpointing.py`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from ckptkit.core.dtypes import ITEMSIZE
from ckptkit.formats.torch_dist.optimizer import BUCKET, NUMBERED, NUMBERED_MASTER, OPTIMIZER, STATE, WHOLE
from ckptkit.formats.torch_dist.reader import CALIBRATION, StoredMetadata

_OTHERS = {"rng_state": "random states", "rerun_state_machine": "rerun state machine"}
# Formats that name state by parameter look alike on disk; content_metadata tells them apart.
_BY_PARAMETER, _BY_NUMBER = "by parameter", "by number"
LEFT_OUT = "convert leaves it out"
_CALIBRATION = "ModelOpt's calibration (_amax of its quantizers)"


def training_state(metadata: StoredMetadata, common: Mapping[str, Any]) -> dict[str, Any]:
    """What lies beside the weights, with sizes in bytes; empty where it is weights alone.

    `optimizer`: bytes of each kind of state (`exp_avg`), of how many parameters it is (in buckets with their padding),
    bytes of experts apart where that is known, how many optimizers are chained, and the format, by Megatron's name
    where `content_metadata` says it. `scheduler`: its values.
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
    """Bytes and elements of every tensor as its chunks hold it, and bytes of every object."""
    for key, stored in metadata.tensors.items():
        elements = sum(math.prod(chunk.sizes) for chunk in stored.chunks)
        yield key, elements * ITEMSIZE[stored.dtype], elements
    for key, blob in metadata.objects.items():
        yield key, blob.length, 0


def _kind(rest: str) -> tuple[str, str | None]:
    """What state a key of an optimizer is of, and the format that names it so; None where that does not tell."""
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
    """What to say of a conversion that leaves ModelOpt's calibration out; empty where there is none."""
    if (found := state.get(_CALIBRATION)) is None:
        return []
    return [f"leaves out {found['tensors']} tensors of {_CALIBRATION}: the weights themselves are not quantized"]


def described(state: Mapping[str, Any]) -> str | None:
    """In one line: what is there, its bytes, and that `convert` leaves it out; None where nothing is."""
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

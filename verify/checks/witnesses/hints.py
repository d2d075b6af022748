"""What to do next about what an engine made of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from converters.config.values import language_part
from quant.formats.part_names import INT4_ENDINGS, WEIGHT_PACKED, WEIGHT_SCALE, WEIGHT_SCALE_INV
from quant.selection.matrices import spell
from verify.checks.config.spellings import in_words
from verify.evidence.folding import LAYER
from verify.witnesses.loading.engine import EngineFacts
from verify.witnesses.loading.job import LoadReport, Observation
from verify.witnesses.loading.names import routers

_NO_KEY = re.compile(r"'\w*Config\w*' object has no attribute '(\w+)'")
KEEP_ROUTER = r"re:.*\.mlp\.gate(\.weight)?$"  # in most families; `keep_router` has each one's own


def keep_router(config: Mapping[str, Any]) -> str:
    """The entry of `ignore` that leaves out this model's routers, as its releases name them."""
    return spell(routers(config)[0].removesuffix(".weight"))


def why_refused(engine: EngineFacts, message: str, lacking: Mapping[str, Any]) -> str:
    """The next move where an engine did not load the model; `lacking`: keys that config.json needs (CK731)."""
    if (match := _NO_KEY.search(message)) is None:
        return f"compare config.json with the release; run `{engine.server}` on the directory to see the whole log"
    release = "take config.json from the release: transformers 5 writes the keys that its own class knows"
    for key, value in lacking.items():
        if key.rpartition(".")[2] == match[1]:
            return f"add {in_words({key: value})} to config.json, or {release}"
    return f"{engine.label} reads {match[1]} of config.json, which does not have it: {release}"


def why_unwritten(engine: EngineFacts, seen: Observation, promised: Collection[str], lost: Collection[str] = ()) -> str:
    """The next move for a parameter that was not written; `lost`: what the checkpoint lacks of a vision tower."""
    if lost and seen.tensor not in promised:
        return "the checkpoint lacks a part of the vision tower, which CK730 names: copy its tensors from the release"
    if seen.tensor == seen.param and seen.tensor not in promised:
        return (
            f"{engine.label}'s class has a parameter that config.json promises no tensor for: it builds that layer "
            f"otherwise; {engine.codes}3 says which tensors it drops"
        )
    return f"the tensor is missing from the checkpoint, or {engine.codes}3 says under which name it was dropped"


def why_dropped(
    engine: EngineFacts, seen: Observation, report: LoadReport, config: Mapping[str, Any], packed: bool
) -> str:
    """The next move for a tensor that was dropped; `packed`: of a quantized checkpoint."""
    if seen.original is not None:
        return (
            f"{engine.label}'s draft model shares embeddings and output layer with the model: make the copies equal to "
            "them, or leave them out"
        )
    if seen.tensor.endswith(f".{WEIGHT_SCALE_INV}"):
        return why_no_scale(engine, seen.tensor, report)
    name = f"{engine.label}'s {report.model}"
    dense = _why_no_dense_layer(seen, name, config)
    return dense or (_why_unpacked(engine, seen.tensor, config) if packed else None) or _why_unknown(seen, name)


def _why_unpacked(engine: EngineFacts, name: str, config: Mapping[str, Any]) -> str | None:
    """The hint where an engine wants the tensor quantized and it is not, or the other way round."""
    module = name.rpartition(".")[0]
    own = (routers(config), routers(config, draft=True))
    if name.endswith(INT4_ENDINGS) and any(f"{module}.weight" in several for several in own):
        return (
            f"{engine.label} builds the router unquantized and silently ignores packed tensors for it; "
            f"add `{keep_router(config)}` to quantization_config.ignore and leave the router in its own dtype"
        )
    if name.endswith(INT4_ENDINGS):
        return (
            f"{engine.label} builds {module} unquantized: store it unquantized and keep it in "
            "quantization_config.ignore"
        )
    if name.endswith("_proj.weight"):
        return (
            f"{engine.label} builds {module} quantized: pack it, or ignore it by a regex that also matches the fused "
            "name (qkv_proj, gate_up_proj)"
        )
    return None


def why_no_scale(engine: EngineFacts, name: str, report: LoadReport) -> str:
    """The hint for scales of FP8 blocks: the engine's class loads none at all, or not those of this module."""
    if not any(one.endswith(f".{WEIGHT_SCALE_INV}") for one in report.equal):
        return (
            f"{engine.label}'s {report.model} loads no scales of FP8 blocks under this name: dequantize it, or "
            "quantize the plain release with `ckptkit quantize --scheme fp8-channel`"
        )
    module = name.rpartition(".")[0]
    return (
        f"{engine.label} builds {module} without FP8: store it in BF16 and name it in modules_to_not_convert of "
        "config.json"
    )


def _why_no_dense_layer(seen: Observation, model: str, config: Mapping[str, Any]) -> str | None:
    """The hint for a dense MLP where the engine's class builds experts all the same."""
    config = language_part(config)
    layer = LAYER.match(seen.tensor)
    if not layer or ".mlp." not in seen.tensor or "elements were written" in seen.what:
        return None
    number = int(layer[1])
    if number in (config.get("mlp_only_layers") or ()):
        key = "mlp_only_layers"
    elif (number + 1) % (config.get("decoder_sparse_step") or 1):
        key = "decoder_sparse_step"
    else:
        return None
    return (
        f"{model} has no parameter {seen.param}: it does not read {key} of config.json and builds experts in "
        f"layer {number}, so it cannot serve this model"
    )


def _why_unknown(seen: Observation, model: str) -> str:
    if seen.tensor.endswith((".experts.gate_up_proj", ".experts.down_proj")):
        return "engines read one tensor an expert: save with save_original_format=True, or convert to Megatron and back"
    if "elements were written" in seen.what:
        return (
            f"{model} builds {seen.param} smaller than the tensor and leaves out the rest: compare the sizes "
            "in config.json with the release; a class may not read all of them (head_dim, for one)"
        )
    unknown = f"{model} has no parameter {seen.param}"
    return f"{unknown}: compare architectures in config.json and the name of the tensor with the release"


def why_not_repacked(engine: EngineFacts, seen: Observation) -> str:
    """The next move for a parameter that was repacked wrongly."""
    param = seen.param.partition("[")[0]
    for ending, hint in engine.misorders:
        if param.endswith(ending):
            return hint
    if param.endswith((WEIGHT_PACKED, WEIGHT_SCALE)):
        return (
            "the sizes may be outside the kernel's limits; try another group size, or load with an unquantized "
            "checkpoint to compare"
        )
    return f"the kernel's limits are not the cause: please report it, with the version of {engine.label}"

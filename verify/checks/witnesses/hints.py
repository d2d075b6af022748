"""What to do next about what SGLang made of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from quant.formats.part_names import INT4_ENDINGS, WEIGHT_PACKED, WEIGHT_SCALE, WEIGHT_SCALE_INV
from quant.selection.spelling import spell
from verify.checks.config.engine_keys import in_words
from verify.evidence.folding import LAYER
from verify.witnesses.sglang.job import TAKEN, Observation, SglangReport
from verify.witnesses.sglang.names import routers

_NO_KEY = re.compile(r"'\w*Config\w*' object has no attribute '(\w+)'")
KEEP_ROUTER = r"re:.*\.mlp\.gate(\.weight)?$"  # in most families; `keep_router` has each one's own


def keep_router(config: Mapping[str, Any]) -> str:
    """The entry of `ignore` that leaves out this model's routers, as its releases name them."""
    return spell(routers(config)[0].removesuffix(".weight"))


def how_shared_expert(report: SglangReport) -> str:
    """What the server needs for GLM's shared expert."""
    if report.fused_shared:
        return (
            "the packed shared expert needs SGLang's fusion of shared experts: start the server without "
            "--disable-shared-experts-fusion"
        )
    return (
        "loaded as with --disable-shared-experts-fusion, which the server needs too where routed experts are INT4 "
        "and the shared one is not"
    )


def why_refused(said: str, lacking: Mapping[str, Any]) -> str:
    """The next move where SGLang did not load the model; `lacking`: keys of config.json with their values (CK731)."""
    if (match := _NO_KEY.search(said)) is None:
        return (
            "compare config.json with the release; run `python -m sglang.launch_server` on the directory to see "
            "the whole log"
        )
    release = "take config.json from the release: transformers 5 writes the keys that its own class knows"
    for key, value in lacking.items():
        if key.rpartition(".")[2] == match[1]:
            return f"add {in_words({key: value})} to config.json, or {release}"
    return f"SGLang reads {match[1]} of config.json, which does not have it: {release}"


def why_unwritten(seen: Observation, promised: Collection[str], lost: Collection[str] = ()) -> str:
    """The next move for a parameter that was not written; `lost`: what the checkpoint lacks of a vision tower."""
    if lost and seen.tensor not in promised:
        return "the checkpoint lacks a part of the vision tower, which CK730 names: copy its tensors from the release"
    if seen.tensor == seen.param and seen.tensor not in promised:
        return (
            "SGLang's class has a parameter that config.json promises no tensor for: it builds that layer "
            "otherwise; CK503 says which tensors it drops"
        )
    return (
        "the tensor is missing from the checkpoint, or CK503 says under which name it was dropped; convert or "
        "quantize again"
    )


def why_dropped(seen: Observation, report: SglangReport, config: Mapping[str, Any], packed: bool) -> str:
    """The next move for a tensor that was dropped; `packed`: of a quantized checkpoint."""
    if seen.what.startswith(TAKEN):
        return (
            "SGLang's draft model shares embeddings and output layer with the model: make the copies equal to them, or "
            "leave them out"
        )
    if seen.tensor.endswith(f".{WEIGHT_SCALE_INV}"):
        return why_no_scale(seen.tensor, report)
    dense = _why_no_dense_layer(seen, report.model, config)
    return dense or (_why_unpacked(seen.tensor, config) if packed else None) or _why_unknown(seen, report.model)


def _why_unpacked(name: str, config: Mapping[str, Any]) -> str | None:
    """The hint where SGLang wants the tensor quantized and it is not, or the other way round."""
    module = name.rpartition(".")[0]
    own = (routers(config), routers(config, draft=True))
    if name.endswith(INT4_ENDINGS) and any(f"{module}.weight" in several for several in own):
        return (
            "SGLang builds the router unquantized and silently ignores packed tensors for it; "
            f"add `{keep_router(config)}` to quantization_config.ignore and leave the router in its own dtype"
        )
    if name.endswith(INT4_ENDINGS):
        return f"SGLang builds {module} unquantized: store it unquantized and keep it in quantization_config.ignore"
    if name.endswith("_proj.weight"):
        return (
            f"SGLang builds {module} quantized: pack it, or ignore it by a regex that also matches the fused name "
            "(qkv_proj, gate_up_proj)"
        )
    return None


def why_no_scale(name: str, report: SglangReport) -> str:
    """The hint for scales of FP8 blocks: SGLang's class loads none at all, or not those of this module."""
    if not any(one.endswith(f".{WEIGHT_SCALE_INV}") for one in report.equal):
        return (
            f"SGLang's {report.model} loads no scales of FP8 blocks, so it cannot serve the model in FP8: dequantize it"
        )
    module = name.rpartition(".")[0]
    return f"SGLang builds {module} without FP8: store it in BF16 and name it in modules_to_not_convert of config.json"


def _why_no_dense_layer(seen: Observation, model: str, config: Mapping[str, Any]) -> str | None:
    """The hint for a dense MLP where SGLang's class builds experts all the same."""
    config = config.get("text_config") or config
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
        f"SGLang's {model} has no parameter {seen.param}: it does not read {key} of config.json and builds experts in "
        f"layer {number}, so it cannot serve this model"
    )


def _why_unknown(seen: Observation, model: str) -> str:
    if seen.tensor.endswith((".experts.gate_up_proj", ".experts.down_proj")):
        return "SGLang reads one tensor an expert: save with save_original_format=True, or convert to Megatron and back"
    if "elements were written" in seen.what:
        return (
            f"SGLang's {model} builds {seen.param} smaller than the tensor and leaves out the rest: compare the sizes "
            "in config.json with the release; a class may not read all of them (head_dim, for one)"
        )
    unknown = f"SGLang's {model} has no parameter {seen.param}"
    return f"{unknown}: compare model_type, num_hidden_layers and the name of the tensor with the release"


def why_not_repacked(seen: Observation) -> str:
    """The next move for a parameter that was repacked wrongly."""
    if seen.param.partition("[")[0].endswith((WEIGHT_PACKED, WEIGHT_SCALE)):
        return (
            "the sizes may be outside the kernel's limits; try another group size, or load with an unquantized "
            "checkpoint to compare"
        )
    return "the kernel's limits are not the cause: please report it, with the version of SGLang"

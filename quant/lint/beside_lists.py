"""The lint rules for what a quantized checkpoint says or holds beside its `ignore` list."""

from __future__ import annotations

from collections.abc import Iterator

from ckptkit.formats.hf.side_files import quantization_of, stated_quantization
from converters.registry import FAMILIES
from quant.formats.groups import is_cache_calibrated
from quant.formats.modelopt import TWO_CONFIGS, differing_configs
from quant.lint.finding import LintFinding, finding
from quant.lint.subject import IgnoreList
from quant.selection.readers import SGLANG

_KV_SCALES = ("k_scale", "v_scale", "kv_scale", "k_proj.output_scale", "v_proj.output_scale")


def indexer_key(subject: IgnoreList) -> Iterator[LintFinding]:
    """Finds the key weight of a DSA indexer in a format that SGLang does not dequantize.

    On CUDA it joins this weight to one in BF16. FP8 it multiplies by `weight_scale_inv` in blocks of numbers; of MXFP8
    it multiplies by the bytes, and of anything else it copies the codes. Source: SGLang 0.5.16,
    `_load_fused_indexer_wk` of `deepseek_weight_loader.py`.
    """
    content, who = quantization_of(subject.config), [reader for reader in subject.readers if reader in SGLANG]
    in_blocks = content.get("quant_method") == "fp8" and bool(content.get("weight_block_size"))
    pairs = zip(subject.matrices, subject.packed, strict=True)
    keys = [matrix.tensor for matrix, packs in pairs if packs and matrix.module.endswith(".indexer.wk")]
    if keys and who and not in_blocks and not subject.is_int4:
        message = "quantized, and SGLang dequantizes it on CUDA from FP8 in blocks alone: it takes codes for weights"
        yield finding("packed", "error", message, "leave it in BF16, or quantize to fp8-block", keys, who)


def groups(subject: IgnoreList) -> Iterator[LintFinding]:
    """Finds several config_groups, of which slime reads only group_0."""
    groups = quantization_of(subject.config).get("config_groups") or {}
    if len(groups) > 1 and "slime" in subject.readers and subject.is_int4:
        message = f"{len(groups)} config_groups; slime reads group_0 alone and packs everything by it"
        yield finding(
            "groups",
            "warning",
            message,
            "give all packed layers one group, or do not quantize updates with slime",
            [],
            ("slime",),
        )


def fusion(subject: IgnoreList) -> Iterator[LintFinding]:
    """Finds unpacked shared experts that SGLang would join with packed routed experts (GLM-4.5)."""
    family = FAMILIES.get(str(subject.config.get("model_type")))
    if not subject.is_int4 or family is None or not family.engine("sglang").joins_shared_expert:
        return
    both = [
        (matrix, packs) for matrix, packs in zip(subject.matrices, subject.packed, strict=True) if matrix.reason is None
    ]
    shared = [matrix.tensor for matrix, packs in both if ".shared_experts." in matrix.module and not packs]
    if shared and any(packs for matrix, packs in both if matrix.expert):
        message = (
            "unpacked, beside packed routed experts; "
            "SGLang joins the two on CUDA unless started with an option against it, and then drops it silently"
        )
        yield finding(
            "shared expert",
            "note",
            message,
            "start SGLang with --disable-shared-experts-fusion",
            shared,
            ("SGLang 0.5.16",),
        )


def kv_cache(subject: IgnoreList) -> Iterator[LintFinding]:
    """Finds a quantized cache of keys and values without scales in the files."""
    content = stated_quantization(subject.config)
    declared = content.get("kv_cache_scheme") is not None or content.get("kv_cache_quant_algo")
    if not declared or not subject.leaves or any(name.endswith(_KV_SCALES) for name in subject.leaves):
        return
    if is_cache_calibrated(content) and "transformers" in subject.readers:
        message = "kv_cache_scheme is static, but no scale of the cache is stored: transformers computes with memory "
        message += "that nobody wrote, and engines take 1.0"
        yield finding(
            "cache scales", "error", message, "calibrate again, or set kv_cache_scheme to null", [], ["transformers"]
        )
        return
    message = "the cache of keys and values is stated to be quantized, and no scale of it is stored: engines take 1.0"
    yield finding("cache scales", "note", message, "set kv_cache_scheme to null unless 1.0 is meant", [])


def two_configs(subject: IgnoreList) -> Iterator[LintFinding]:
    """Finds a hf_quant_config.json that contradicts config.json."""
    for differs in differing_configs(subject.path).values():
        yield finding("two configs", "error", differs, TWO_CONFIGS, [])


def not_known(subject: IgnoreList) -> Iterator[LintFinding]:
    """Finds a model whose modules are not known, so that its entries are judged by themselves alone."""
    if not subject.matrices:
        model = subject.config.get("model_type")
        message = (
            f"which tensors of model_type {model!r} are Linear layers is not known: entries are not held against them"
        )
        yield finding("not judged", "note", message, "`ckptkit inspect` says how its tensors are stored", [])

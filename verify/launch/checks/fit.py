"""Whether a model can be shared out over the ranks of an engine, or of a trainer without Megatron; part of CK722.

Source: SGLang's `get_attention_tp_size`, `QKVParallelLinear`, `FusedMoE` and `Fp8MoEMethod`; vLLM's
`ModelConfig.verify_with_parallel_config` and `QKVParallelLinear`; verl `models/transformers/monkey_patch.py` and ROLL
`fsdp2_strategy.py` for Ulysses; NeMo-RL `models/dtensor/parallelize.py` and Automodel's `validate_tp_mesh`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckptkit.formats.hf.side_files import quantization_of
from converters.config.dims import ModelDims
from verify.issue import Issue
from verify.launch.stacks.sizes import Cut


def engine_fit(dims: ModelDims, config: Mapping[str, Any], cut: Cut) -> Iterator[Issue]:
    """What of a model an engine cannot share out. Of vLLM heads alone: it pads and replicates the rest by itself."""
    hint, attention = f"choose another {cut.where}", cut.attention or cut.ranks
    if dims.heads % attention:
        yield Issue(f"num_attention_heads that divides over {attention} ranks", f"{dims.heads}", hint)
    elif not dims.mla and dims.groups % attention and attention % dims.groups:
        expected = f"num_key_value_heads that divides {attention} ranks, or is divided by them"
        yield Issue(expected, f"{dims.groups}", hint)
    if cut.by == "vllm":
        return
    if dims.experts and (dims.experts + cut.redundant) % cut.ep:
        expected, actual = f"experts that divide over {cut.ep_option.removeprefix('--').replace('-', '_')}", "experts"
        hint = f"choose another {cut.ep_option}"
        yield Issue(f"{expected} = {cut.ep}", f"{dims.experts + cut.redundant} {actual}", hint)
    yield from _blocks(dims, config, cut)


def _blocks(dims: ModelDims, config: Mapping[str, Any], cut: Cut) -> Iterator[Issue]:
    quantization = quantization_of(config)
    block = quantization.get("weight_block_size") if isinstance(quantization, Mapping) else None
    if not isinstance(block, list) or not block or type(block[0]) is not int or block[0] < 1:
        return
    if quantization.get("quant_method") != "fp8":
        return
    experts = dims.experts and cut.plain_experts
    rows = [("moe_intermediate_size", dims.expert_ffn, cut.ranks // cut.ep)] if experts else []
    rows += [("intermediate_size", dims.ffn, cut.dense)] if dims.dense and cut.dense else []
    for name, size, share in rows:
        if share > 1 and size and (size % share or (size // share) % block[0]):
            expected = f"{name} whose part on each of {share} ranks divides by the FP8 block of {block[0]}"
            hint = f"serve with fewer tensor parallel ranks, or more {cut.ep_option}"
            yield Issue(expected, f"{name} = {size}, {size / share:g} a rank", hint)


def sequence_fit(dims: ModelDims, ranks: int, where: str) -> Iterator[Issue]:
    """Heads over the ranks that share a sequence by Ulysses, each of which computes some heads of all of it."""
    hint = "choose a size that divides the heads"
    if dims.heads % ranks:
        yield Issue(f"num_attention_heads that divides over {ranks} ranks ({where})", f"{dims.heads}", hint)
    elif dims.groups % ranks and ranks % dims.groups:
        expected = f"num_key_value_heads that divides {ranks} ranks, or is divided by them ({where})"
        yield Issue(expected, f"{dims.groups}", hint)


def dtensor_fit(dims: ModelDims, ranks: int, where: str) -> Iterator[Issue]:
    """Heads over the tensor parallel ranks of DTensor, which replicates none of them."""
    hint = "choose a tensor_parallel_size that divides both numbers of heads"
    for name, heads in (("num_attention_heads", dims.heads), ("num_key_value_heads", dims.groups)):
        if heads % ranks:
            yield Issue(f"{name} that divides over {ranks} ranks ({where})", f"{heads}", hint)

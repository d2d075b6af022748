"""Whether a model can be shared out over the ranks of an engine, or of a trainer without Megatron; part of CK722.

Source: SGLang's `get_attention_tp_size`, `QKVParallelLinear`, `FusedMoE` and `Fp8MoEMethod`; vLLM's
`ModelConfig.verify_with_parallel_config` and `QKVParallelLinear`; verl `models/transformers/monkey_patch.py` and ROLL
`fsdp2_strategy.py` for Ulysses; NeMo-RL `models/dtensor/parallelize.py` and Automodel's `validate_tp_mesh`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckptkit.formats.hf.side_files import quantization_of
from converters.config.dims import ModelDims
from verify.issue import Issue
from verify.launch.arguments import Server


@dataclass(frozen=True)
class EngineRanks:
    """How a rollout engine cuts a model: `attention` heads over so many ranks, experts over `ep` of `tp`.

    `dense`: ranks that share the layers without experts, None where they are not known. `plain_experts`: no size but
    these two cuts experts. `redundant`: experts that are held twice. `option` and `ep_option` name what to change.
    """

    server: Server | None
    tp: int
    ep: int = 1
    attention: int = 1
    dense: int | None = None
    plain_experts: bool = True
    redundant: int = 0
    option: str = "--rollout-num-gpus-per-engine"
    ep_option: str = "--sglang-ep-size"


def engine_fit(dims: ModelDims, config: Mapping[str, Any], ranks: EngineRanks) -> Iterator[Issue]:
    """What of a model an engine cannot share out. Of vLLM heads alone: it pads and replicates the rest by itself."""
    hint = f"choose another {ranks.option}"
    if dims.heads % ranks.attention:
        yield Issue(f"num_attention_heads that divides over {ranks.attention} ranks", f"{dims.heads}", hint)
    elif not dims.mla and dims.groups % ranks.attention and ranks.attention % dims.groups:
        expected = f"num_key_value_heads that divides {ranks.attention} ranks, or is divided by them"
        yield Issue(expected, f"{dims.groups}", hint)
    if ranks.server == "vllm":
        return
    if dims.experts and (dims.experts + ranks.redundant) % ranks.ep:
        expected, actual = f"experts that divide over {ranks.ep_option.removeprefix('--').replace('-', '_')}", "experts"
        hint = f"choose another {ranks.ep_option}"
        yield Issue(f"{expected} = {ranks.ep}", f"{dims.experts + ranks.redundant} {actual}", hint)
    yield from _blocks(dims, config, ranks)


def _blocks(dims: ModelDims, config: Mapping[str, Any], ranks: EngineRanks) -> Iterator[Issue]:
    quantization = quantization_of(config)
    block = quantization.get("weight_block_size") if isinstance(quantization, Mapping) else None
    if not isinstance(block, list) or not block or type(block[0]) is not int or block[0] < 1:
        return
    if quantization.get("quant_method") != "fp8":
        return
    experts = dims.experts and ranks.plain_experts
    rows = [("moe_intermediate_size", dims.expert_ffn, ranks.tp // ranks.ep)] if experts else []
    rows += [("intermediate_size", dims.ffn, ranks.dense)] if dims.dense and ranks.dense else []
    for name, size, share in rows:
        if share > 1 and size and (size % share or (size // share) % block[0]):
            expected = f"{name} whose part on each of {share} ranks divides by the FP8 block of {block[0]}"
            hint = f"serve with fewer tensor parallel ranks, or more {ranks.ep_option}"
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

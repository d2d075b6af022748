"""CK722: the parallel sizes of a launch divide its GPUs, and the ranks of its engines divide the model.

Source: SGLang's `get_attention_tp_size`, `QKVParallelLinear` and `FusedMoE`; vLLM's
`ModelConfig.verify_with_parallel_config` and `QKVParallelLinear`; verl `models/transformers/monkey_patch.py` and ROLL
`fsdp2_strategy.py` for Ulysses; NeMo-RL `models/dtensor/parallelize.py` and Automodel's `validate_tp_mesh`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptkit.converters.config.dims import ModelDims
from ckptkit.formats.hf.side_files import quantization_of
from ckptkit.verify.core.check import CheckResult, check
from ckptkit.verify.core.issue import Issue, warning_if
from ckptkit.verify.core.skip import CannotCheck, NotApplicable
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.launch.checks.engine import engine_config, engine_dims, job_of
from ckptkit.verify.launch.stacks.sizes import GpuPlacement, ModelSplit
from ckptkit.verify.launch.words import at_places, first_file
from ckptkit.verify.quirks import quirk


def engine_fit(dims: ModelDims, config: Mapping[str, Any], cut: ModelSplit) -> Iterator[Issue]:
    """Sizes of a model that an engine cannot divide. vLLM pads and replicates all except heads and FP8 blocks."""
    hint, attention = f"choose another {cut.asked_by}", cut.attention or cut.ranks
    yield from _heads(dims.heads, attention if dims.mla else dims.groups, attention, "", hint)
    yield from _blocks(dims, config, cut)
    if cut.by == "vllm":
        return
    if dims.experts and (dims.experts + cut.redundant) % cut.ep:
        expected = f"a number of experts divisible by {cut.ep_option} = {cut.ep}"
        yield Issue(expected, f"{dims.experts + cut.redundant} experts", f"choose another {cut.ep_option}")
    if (padding := quirk("sglang", "vocabulary-padding")) is None:
        return
    rows = math.ceil(dims.vocab / padding.value) * padding.value
    if rows % attention and dims.heads % attention == 0:
        expected = f"a vocabulary that divides over {attention} ranks after padding to a multiple of {padding.value}"
        hint = f"choose another {cut.asked_by}: {padding.message}"
        yield Issue(expected, f"vocab_size = {dims.vocab}, which gives {rows} rows", hint, severity="warning")


# verl's `rollout.quantization=fp8`. Source: its `vllm_fp8_utils.py` and `async_sglang_server.py`.
_ONLINE_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@dataclass(frozen=True)
class _Side:
    """The rows or columns of a weight that an engine cuts. An FP8 block has a size for each."""

    name: str  # the settings that give the size
    size: int  # of all ranks together
    ranks: int
    layers: tuple[int, ...]
    module: str
    columns: bool = False

    def can_be_split(self, block: Sequence[int], hidden: int, least: int) -> bool:
        """Whether blocks of these experts can be split, down to `least`, until a rank's part divides by them."""
        part = self.size // self.ranks if self.size % self.ranks == 0 else 1
        return self.module == "mlp.experts" and math.gcd(*block, part, hidden) >= least

    def may_be_ignored(self, names: Sequence[object]) -> bool:
        """Whether a list of modules without FP8 may contain all of these layers. A pattern may match any."""
        paths = [f".model.layers.{layer}.{self.module}." for layer in self.layers]
        parts = [name.removeprefix("model.") for name in names if isinstance(name, str) and not name.startswith("re:")]
        return len(parts) < len(names) or all(any(f".{part}." in path for part in parts) for path in paths)


def _blocks(dims: ModelDims, config: Mapping[str, Any], cut: ModelSplit) -> Iterator[Issue]:
    """Sides with a part that ends inside an FP8 block. Engines refuse such a layer when they build it."""
    quantization = _ONLINE_FP8 if cut.online_fp8 else quantization_of(config)
    if not isinstance(quantization, Mapping):
        return
    block = quantization.get("weight_block_size") if quantization.get("quant_method") == "fp8" else None
    if not isinstance(block, list) or len(block) != 2 or any(type(side) is not int or side < 1 for side in block):
        return
    keys = ("modules_to_not_convert", "ignored_layers")
    # A value that is not a list may name any layer.
    lists = [value if isinstance(value, list) else [None] for value in map(quantization.get, keys) if value]
    names, seen = [name for one in lists for name in one], set[str]()
    for side in _sides(dims, cut):
        size = block[side.columns]
        is_broken = side.layers and size > 1 and side.size % (side.ranks * size) and not side.may_be_ignored(names)
        if is_broken and side.name not in seen:
            seen.add(side.name)
            ranks = f"each of {side.ranks} ranks" if side.ranks > 1 else "one rank"
            expected = f"{side.name} with a part on {ranks} that is divisible by the FP8 block of {size}"
            hint = f"serve with fewer tensor parallel ranks, or a larger {cut.ep_option}"
            finer = quirk("vllm", "finer-blocks") if cut.by == "vllm" else None
            is_split = finer is not None and side.can_be_split(block, dims.hidden, finer.value)
            hint += f"; {finer.message}" if finer is not None and is_split else ""
            actual = f"{side.name} = {side.size}, which is {side.size / side.ranks:g} per rank"
            yield Issue(expected, actual, hint, severity=warning_if(is_split))


def _sides(dims: ModelDims, cut: ModelSplit) -> Iterator[_Side]:
    """The sides that SGLang or vLLM compares with the block.

    SGLang compares the rows of each part of a merged weight (q, k and v, or gate and up), even on a single rank; vLLM
    does not. Both compare sides that tensor parallel ranks cut, SGLang only if all ranks do.

    Source: SGLang's `Fp8LinearMethod.validate_block_quant_shapes` and `Fp8MoEMethod.create_weights`; vLLM's
    `_maybe_allow_fp8_block_shape_mismatch`; the `validate_fp8_block_shape` of both.
    """
    is_vllm, attention = cut.by == "vllm", cut.attention or cut.ranks
    yield from _attention(dims, attention, is_vllm, attention > 1 and (is_vllm or attention == cut.ranks))
    if cut.dense:
        dense = _Side("intermediate_size", dims.ffn, cut.dense, dims.dense, "mlp.gate_proj")
        if not is_vllm:
            yield dense
        if cut.dense > 1 and (cut.dense == cut.ranks or is_vllm):
            yield replace(dense, module="mlp.down_proj", columns=True)
    if dims.experts and cut.plain_experts:
        expert = _Side("moe_intermediate_size", dims.expert_ffn, cut.ranks // cut.ep, dims.moe, "mlp.experts")
        yield expert
        if cut.ranks > 1:
            yield replace(expert, columns=True)


def _attention(dims: ModelDims, ranks: int, is_vllm: bool, is_cut: bool) -> Iterator[_Side]:
    """The sides of attention. `is_cut`: the engine compares the sides that the ranks cut."""
    if dims.mla:
        mla, heads = dims.mla, f"num_attention_heads {dims.heads} x"
        query = f"{heads} (qk_nope_head_dim {mla.nope} + qk_rope_head_dim {mla.rope})"
        value = f"qk_nope_head_dim {mla.nope} + v_head_dim {mla.value}"
        sides = [
            (query, dims.heads * (mla.nope + mla.rope), "q_b_proj" if mla.q_rank else "q_proj", False),
            (f"{heads} ({value})", dims.heads * (mla.nope + mla.value), "kv_b_proj", False),
            (f"{heads} v_head_dim {mla.value}", dims.heads * mla.value, "o_proj", True),
        ]
        for name, size, module, columns in sides if is_cut else ():
            yield _Side(name, size, ranks, dims.softmax_layers, f"self_attn.{module}", columns)
        return
    name, layers = f"num_attention_heads {dims.heads} x head_dim {dims.head_dim}", dims.softmax_layers
    rows = _Side(name, dims.heads * dims.head_dim, ranks, layers, "self_attn.q_proj")
    if not is_vllm:
        yield replace(rows, size=rows.size * (1 + dims.attention_gate))
        name, share = f"num_key_value_heads {dims.groups} x head_dim {dims.head_dim}", min(ranks, dims.groups)
        yield _Side(name, dims.groups * dims.head_dim, share, layers, "self_attn.k_proj")
    if is_cut:
        yield replace(rows, module="self_attn.o_proj", columns=True)


def _heads(heads: int, groups: int, ranks: int, where: str, hint: str) -> Iterator[Issue]:
    """Heads that do not divide over ranks. Keys and values may be copied to several ranks."""
    if heads % ranks:
        yield Issue(f"num_attention_heads divisible by {ranks} ranks{where}", f"{heads} heads", hint)
    elif groups % ranks and ranks % groups:
        yield Issue(f"a multiple or divisor of {ranks} as num_key_value_heads{where}", f"{groups} heads", hint)


def _placement(subject: Subject) -> GpuPlacement:
    """The sizes and GPUs of the job. Raises NotApplicable for a launch that counts no GPUs."""
    if (placement := job_of(subject).placement) is None:
        raise NotApplicable("the launch has no number of GPUs")
    return placement


@check("CK722", applies_to=_placement)
def gpus_divide(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Compares nodes x GPUs with tp x pp x cp and ep x etp x pp of every role, and sizes of roles in one process.

    Then divides the model's heads, experts and FP8 blocks by the ranks of engines, and of trainers without Megatron.
    """
    placement, job = _placement(subject), job_of(subject)
    groups = [group for group in placement.groups if group.gpus.count is not None and group.products]
    roots = [(cut, job.models.get(cut.role, job.hf)) for cut in placement.cuts]
    cuts = [(cut, config) for cut, root in roots if root is not None and (config := engine_config(root))]
    if not (groups or placement.issues or cuts):
        raise CannotCheck("the number of GPUs or a parallel size is unknown", "CK717")
    result.compared(max(len(cuts) + sum(len(group.products) for group in groups) + len(placement.issues), 1))
    for group in groups:
        yield from group.issues()
    yield from placement.issues
    for cut, config in cuts:
        for issue in _indivisible(cut, config):
            file = first_file(cut.words) or issue.file or cut.file
            yield replace(issue, expected=f"{issue.expected}{at_places(cut.words)}", file=file)


def _indivisible(cut: ModelSplit, config: Mapping[str, Any]) -> Iterator[Issue]:
    """Sizes of a model that the ranks do not divide. DTensor does not replicate heads."""
    dims, where = engine_dims(config), f" ({cut.asked_by})"
    if cut.by == "ulysses":
        yield from _heads(dims.heads, dims.groups, cut.ranks, where, "choose a size that divides the heads")
    elif cut.by == "dtensor":
        hint = "choose a tensor_parallel_size that divides both numbers of heads"
        for name, heads in (("num_attention_heads", dims.heads), ("num_key_value_heads", dims.groups)):
            if heads % cut.ranks:
                yield Issue(f"{name} divisible by {cut.ranks} ranks{where}", f"{heads} heads", hint)
    elif cut.ranks % cut.ep == 0:
        yield from engine_fit(dims, config, cut)

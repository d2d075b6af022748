"""What slime calls of ours in a small run: a reward, ckptkit's hooks, and on request faults in what is sent.

`QUANTIZER=ckptkit` has ckptkit's quantizer take the place of slime's, `ckptkit:5` in the first five updates. `FAULT`
names faults of `_FAULTS`: the first is planted in the second update, the next in the one after it. What ckptkit says of
such an update is printed and the job goes on, so that one job shows them all. With `GO_ON` set, so it does after any
other update.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from ckptkit.core.errors import CkptkitError
from ckptkit.hooks import after_init, watch_updates

Pairs = list[tuple[str, Any]]


async def reward(args: Namespace, sample: Any, **_: Any) -> float:
    """`--custom-rm-path`: differs between the samples of a prompt, so that there is something to learn."""
    return float(sum(sample.tokens) % 7)


def init(args: Namespace) -> None:
    """`--custom-megatron-init-path`."""
    after_init(args)
    from slime.backends.megatron_utils import megatron_to_hf
    from slime.backends.megatron_utils.update_weight.update_weight_from_tensor import UpdateWeightFromTensor

    name, _, last = os.environ.get("QUANTIZER", "").partition(":")
    if name == "ckptkit":
        _use_our_quantizer(megatron_to_hf, UpdateWeightFromTensor, int(last or sys.maxsize))
    _plant(UpdateWeightFromTensor, is_recorded=False)  # between what is recorded and the engine
    watch_updates(UpdateWeightFromTensor, "_send_hf_params")
    _plant(UpdateWeightFromTensor, is_recorded=True)
    _say_what_is_checked(UpdateWeightFromTensor)


def _use_our_quantizer(module: Any, updater: type, last: int) -> None:
    """The change of docs/jobs.md, without one to slime's files, up to the update with the number `last`."""
    from ckptkit.quant.online.trainer_hooks import quantize_params

    theirs, updating = module.quantize_params, updater.update_weights  # type: ignore[attr-defined]

    def ours(args: Namespace, name: str, pairs: Pairs, config: Any, *more: Any) -> Any:
        if (config or {}).get("quant_method") == "compressed-tensors":
            return quantize_params(pairs, args.hf_checkpoint, grid="qmax7")
        return theirs(args, name, pairs, config, *more)

    def chosen(self: Any) -> None:
        module.quantize_params = ours if self.weight_version < last else theirs
        updating(self)

    updater.update_weights = chosen  # type: ignore[attr-defined]


def _say_what_is_checked(updater: type) -> None:
    updating = updater.update_weights  # type: ignore[attr-defined]

    def said(self: Any) -> None:
        found = "ckptkit finds nothing"
        try:
            updating(self)
        except CkptkitError as error:
            if not _fault_in(self) and not os.environ.get("GO_ON"):
                raise
            found = f"ckptkit raises: {error}".replace("\n", " | ")
        seconds = getattr(vars(self).get("_ckptkit_check"), "seconds", 0.0)
        fault = _fault_in(self) or "none"
        print(
            f"FACT update {self.weight_version}, fault {fault}: {found} ({seconds:.2f} s of checks so far)", flush=True
        )

    updater.update_weights = said  # type: ignore[attr-defined]


def _fault_in(updater: Any) -> str:
    """The name of the fault in the update under way, or an empty text."""
    names, number = os.environ.get("FAULT", "").split(), updater.weight_version - 2
    return names[number] if 0 <= number < len(names) else ""


def _plant(updater: type, is_recorded: bool) -> None:
    sending = updater._send_hf_params  # type: ignore[attr-defined]

    def sent(self: Any, pairs: Pairs) -> Any:
        recorded, fault = _FAULTS.get(_fault_in(self), (None, list))
        return sending(self, fault(list(pairs)) if recorded is is_recorded else pairs)

    updater._send_hf_params = sent  # type: ignore[attr-defined]


def _exchange(pairs: Pairs, one: str, other: str) -> Pairs:
    names = {one: other, other: one}

    def renamed(name: str) -> str:
        return next((name.replace(old, new) for old, new in names.items() if old in name), name)

    return [(renamed(name), tensor) for name, tensor in pairs]


def _pack_routers(pairs: Pairs) -> Pairs:
    """By slime's quantizer, as if `ignore` had no entry for them."""
    from slime.backends.megatron_utils.megatron_to_hf.processors import quantizer_compressed_tensors as processor

    config = {"config_groups": {"group_0": {"weights": {"group_size": 32, "symmetric": True}}}}
    routers = [pair for pair in pairs if pair[0].endswith(".mlp.gate.weight")]
    packed: Pairs = processor.quantize_params_compressed_tensors(routers, config)
    return [*(pair for pair in pairs if not pair[0].endswith(".mlp.gate.weight")), *packed]


# Whether a fault is recorded as sent, and what it makes of a bucket.
_FAULTS: dict[str, tuple[bool, Callable[[Pairs], Pairs]]] = {
    "bucket": (False, lambda pairs: [] if any(".layers.5." in name for name, _ in pairs) else pairs),
    "expert": (False, lambda pairs: _exchange(pairs, ".layers.3.mlp.experts.1.", ".layers.3.mlp.experts.2.")),
    "offset": (False, lambda pairs: _exchange(pairs, ".layers.7.", ".layers.8.")),
    "router": (True, _pack_routers),
    "head": (True, lambda pairs: [pair for pair in pairs if pair[0] != "lm_head.weight"]),
}


def spec(args: Namespace, config: Any, vp_stage: int | None = None) -> Any:
    """`--spec slime_job spec`, where Transformer Engine is missing: Megatron's local layers under the names it has.

    slime's exporter knows no others. Attention takes packed sequences, which Megatron's own without it refuses.
    Nothing is cut over ranks.
    """
    import torch
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.experts import TEGroupedMLP
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
    from torch.nn import Parameter, functional

    class NormAndLinear(ColumnParallelLinear):
        """A linear layer that holds the weight of the norm before it."""

        def __init__(self, inputs: int, outputs: int, *, config: Any, **more: Any) -> None:
            super().__init__(inputs, outputs, config=config, **more)
            self.eps = config.layernorm_epsilon
            self.layer_norm_weight = Parameter(torch.ones(inputs, dtype=self.weight.dtype, device=self.weight.device))

        def forward(self, hidden: Any, *more: Any, **named: Any) -> Any:
            return super().forward(functional.rms_norm(hidden, hidden.shape[-1:], self.layer_norm_weight, self.eps))

    class PackedAttention(torch.nn.Module):
        """Causal attention within each packed sequence; q, k and v are [tokens, heads, head size]."""

        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__()

        def forward(self, q: Any, k: Any, v: Any, *_: Any, packed_seq_params: Any, **__: Any) -> Any:
            lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
            parts = zip(*(one.transpose(0, 1).split(lengths, 1) for one in (q, k, v)), strict=True)
            found = [functional.scaled_dot_product_attention(*one, is_causal=True, enable_gqa=True) for one in parts]
            return torch.cat(found, 1).transpose(0, 1).flatten(1)

    class GroupedLinear(torch.nn.Module):
        """The matrices of one projection of all experts, `weight0`, `weight1` and so on."""

        def __init__(self, count: int, inputs: int, outputs: int, *, config: Any, **_: Any) -> None:
            super().__init__()
            self.count = count
            for number in range(count):
                weight = Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype, device="cuda"))
                self.register_parameter(f"weight{number}", weight)

        def forward(self, hidden: Any, tokens: list[int]) -> Any:
            parts = zip(hidden.split(tokens), self.parameters(), strict=True)
            return torch.cat([functional.linear(part, weight) for part, weight in parts]), None

        def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
            found = {}
            for number, weight in enumerate(self.parameters()):
                place = (*sharded_offsets, (len(sharded_offsets), number, self.count))
                cut = make_sharded_tensors_for_checkpoint({"weight": weight}, prefix, {}, place)
                found[f"{prefix}weight{number}"] = cut[f"{prefix}weight"]
            return found

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # the router asks for it, and it is imported with Transformer Engine only
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage)
    for layer in block.layer_specs:
        parts, attention = layer.submodules, layer.submodules.self_attention.submodules
        parts.input_layernorm, attention.linear_qkv = IdentityOp, NormAndLinear
        attention.core_attention = PackedAttention
        parts.sharded_state_dict_keys_map = {}
        if args.num_experts:
            experts = parts.mlp.submodules.experts
            experts.module = TEGroupedMLP
            experts.submodules = MLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear)
        else:
            parts.pre_mlp_layernorm, parts.mlp.submodules.linear_fc1 = IdentityOp, NormAndLinear
    return block

"""Computes, by their formulas, what Megatron leaves to CUDA kernels and to trainers' own layers.

For tests of mappings through Megatron's forward pass, in processes that import Megatron: `compute_layers` gives the
modules of `ckptkit.verify.witnesses.megatron.variants` that only hold parameters a forward pass.
"""

import math
import sys

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.experimental_attention_variant import dsa
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.nn import functional

from ckptkit.verify.witnesses.megatron import model as megatron_model
from ckptkit.verify.witnesses.megatron.variants import attention, norms, recurrent
from ckptkit.verify.witnesses.megatron.variants.attention import ROTARY_FIRST
from ckptkit.verify.witnesses.megatron.variants.variant import Variant, WholeLinear


def rms_norm(tensor, factor, eps):
    wide = tensor.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * factor).type_as(tensor)


def hadamard(tensor):
    size, step = tensor.shape[-1], 1
    result = tensor
    while step < size:
        first, second = result.reshape(*tensor.shape[:-1], -1, 2, step).unbind(-2)
        result = torch.stack([first + second, first - second], dim=-2)
        step *= 2
    return result.reshape(tensor.shape) / math.sqrt(size)


def scan(x, dt, rates, b, c, chunk_size, **more):
    """`mamba_chunk_scan_combined` of mamba_ssm as the recurrence that it stands for, token by token, in float32.

    x [batch, sequence, heads, head_dim], dt [batch, sequence, heads], rates (A) [heads], b and c [batch, sequence,
    groups, state], D [heads]: state = state exp(dt A) + dt x b, y = state c + D x. Raises TypeError for what Megatron
    asks of the kernel and this does not do.
    """
    skip, bias, softplus = (more.pop(name) for name in ("D", "dt_bias", "dt_softplus"))
    asked = {name: value for name, value in more.items() if value is not None and value is not False}
    asked.pop("state_dtype", None)
    if asked or not softplus:
        raise TypeError(f"the recurrence of Mamba in torch does not know {asked or 'dt without softplus'}")
    heads = x.shape[2]
    step = functional.softplus(dt.float() + bias.float())
    inputs, outputs = (part.float().repeat_interleave(heads // part.shape[2], dim=2) for part in (b, c))
    state = torch.zeros(x.shape[0], heads, x.shape[3], b.shape[3], device=x.device)
    found = []
    for place in range(x.shape[1]):
        now = step[:, place]
        taken = (now[..., None] * x[:, place].float())[..., None] * inputs[:, place, :, None]
        state = state * torch.exp(now * rates)[..., None, None] + taken
        found.append((state * outputs[:, place, :, None]).sum(-1))
    result = torch.stack(found, dim=1) + skip.float()[:, None] * x.float()
    return result.type_as(x)


def _norm_over_heads(self, tensor):
    square = tensor.float().square().sum((-2, -1), keepdim=True)
    torch.distributed.all_reduce(square, group=parallel_state.get_tensor_model_parallel_group())
    scaled = tensor.float() * torch.rsqrt(square / self.width + self.eps)
    return self.weight.view(tensor.shape[-2:]) * scaled.to(self.weight.dtype)


def _gated_norm(self, tensor, gate):
    """Root mean square norm of x silu(z), over each group of features, times its weight."""
    gated = tensor.float() * functional.silu(gate.float())
    grouped = gated.reshape(*gated.shape[:-1], -1, self.group_size)
    normed = rms_norm(grouped, self.weight.float().reshape(-1, self.group_size), self.eps)
    return normed.flatten(-2).type_as(tensor)


def _normed_column(self, tensor, *args, **kwargs):
    offset = int(self.config.layernorm_zero_centered_gamma)
    normed = rms_norm(tensor, offset + self.layer_norm_weight.float(), self.config.layernorm_epsilon)
    return ColumnParallelLinear.forward(self, normed, *args, **kwargs)


class _ComputedSandwichLayer(norms.SandwichLayer):
    """Adds to the residual stream what a norm makes of each output (which has no bias)."""

    forward = TransformerLayer.forward

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.self_attn_bda = _after(self.post_self_attn_layernorm, self.self_attn_bda)
        self.mlp_bda = _after(self.post_mlp_layernorm, self.mlp_bda)


def _after(norm, add):
    def build(training, fused):
        def run(output, residual, dropout):
            return add(training, fused)((norm(output[0]), output[1]), residual, dropout)

        return run

    return build


def _computed_linear(base, norm, build=norms._normed_linear):
    class Computed(build(base, norm)):
        def forward(self, tensor):
            output, bias = base.forward(self, tensor)
            return self.post_layernorm(output), bias

    return Computed


class _TwoRopeAttention(SelfAttention):
    """Megatron's attention, with the rotary embedding of its layer in the place of the model's."""

    def __init__(self, config, submodules, layer_number, *args, dims, **more):
        super().__init__(config, submodules, layer_number, *args, **more)
        local = layer_number - 1 in dims.window_layers
        self.rope = RotaryEmbedding(
            kv_channels=dims.head_dim,
            rotary_percent=dims.rotary_fraction,
            rotary_base=dims.local_rope_theta if local else dims.rope_theta,
            seq_len_interpolation_factor=None if local or dims.rope_scaling is None else dims.rope_scaling["factor"],
            use_cpu_initialization=config.use_cpu_initialization,
        )

    def forward(self, *args, rotary_pos_emb, **kwargs):
        return super().forward(*args, rotary_pos_emb=self.rope(rotary_pos_emb.shape[0]), **kwargs)


def _settings(dims):
    # "Deterministic" selects Megatron's own recurrence of a gated delta net.
    found = {"deterministic_mode": True} if dims.linear is not None else {}
    if dims.activation == "gelu_pytorch_tanh":
        found |= {
            "activation_func": lambda tensor: functional.gelu(tensor, approximate="tanh"),
            "softmax_scale": dims.attention_scale,
        }
    return found


def _adapt(dims, config, spec, transformer_engine):
    for layer in spec.layer_specs:
        attention = layer.submodules.self_attention
        if dims.local_rope_theta is not None:
            attention.module, attention.params = _TwoRopeAttention, {**attention.params, "dims": dims}
        if dims.indexer is not None and not ROTARY_FIRST:
            indexer = attention.submodules.core_attention.submodules.indexer
            indexer.module, indexer.params = RotaryFirstIndexer, {"interleaved": dims.indexer.rope_interleaved}


def _finish(dims, chunk):
    if dims.embedding_scale is None or not chunk.pre_process:
        return
    scale = torch.tensor(dims.embedding_scale)
    # transformers rounds the scale to the model's dtype first.
    chunk.embedding.register_forward_hook(lambda module, inputs, output: output * scale.to(output.dtype))


class RotaryFirstIndexer(dsa.DSAIndexer):
    """Megatron's indexer before 0.19, rotating the dimensions that the release means, which the unchanged one does not.

    So `verify` does not ask it (lab/mappings.md).
    """

    def __init__(self, *args, interleaved, **kwargs):
        super().__init__(*args, **kwargs)
        self._interleaved = interleaved

    def _apply_rope(self, x, rotary_pos_emb, mscale, **ignored):
        turned, rest = x[..., : self.qk_pos_emb_head_dim], x[..., self.qk_pos_emb_head_dim :]
        # The order of the last three arguments is (halves or pairs within, pairs first, scale).
        turned = rope_utils._apply_rotary_pos_emb_bshd(turned, rotary_pos_emb, False, self._interleaved, mscale)
        return torch.cat([turned, rest], dim=-1)


def compute_layers():
    """For the process: models that `build_chunks` makes compute."""
    dsa.rotate_activation = hadamard
    vars(sys.modules[MambaMixer.__module__])["mamba_chunk_scan_combined"] = scan
    recurrent._DELTA_NET.l2norm = lambda one: one * torch.rsqrt(one.square().sum(-1, keepdim=True) + 1e-6)
    forward = {
        attention.NormOverHeads: _norm_over_heads,
        recurrent.NormedColumnParallelLinear: _normed_column,
        recurrent.GatedNorm: _gated_norm,
        WholeLinear: lambda self, tensor: (functional.linear(tensor, self.weight), None),
        norms.ZeroCenteredNorm: lambda self, tensor: rms_norm(tensor, 1 + self.weight.float(), self.eps),
    }
    for module, function in forward.items():
        module.forward = function
    norms.SandwichLayer, norms._normed_linear = _ComputedSandwichLayer, _computed_linear
    megatron_model.VARIANTS = (*megatron_model.VARIANTS, Variant(_settings, _adapt, _finish))

"""Kimi delta attention (KDA), the linear attention of Kimi K3 and GLM-5.3-Flash.

Names on Megatron's side are those of Megatron-Bridge's `models/kimi/kimi_k3_bridge.py` at 067f987, which keeps HF's.
"""

from __future__ import annotations

from converters.config.dims import ModelDims
from converters.ops.basic import Copy, Op
from converters.ops.hybrid import ZeroPadded
from converters.ops.shapes import Shape
from converters.rules import Kind, ParamMapping, decoder


def kda(dims: ModelDims, *, full_gate: bool, padding: int = 0) -> tuple[ParamMapping, ...]:
    """Everything of a KDA layer's attention.

    `full_gate`: its output gate is one projection, not two with a head's size between them. `padding`: zeros behind the
    heads' values in HF's `A_log`.
    """
    net, at = dims.kda, decoder(dims, dims.mixers)
    assert net is not None, "a family without KDA has no such rules"
    width, hidden = net.heads * net.head_dim, dims.hidden
    whole, low_ranks = ("qkvg", "f") if full_gate else ("qkv", "fg")
    projections = {
        **{f"{x}_proj": (width, hidden) for x in whole},
        **{f"{x}_b_proj": (width, net.head_dim) for x in low_ranks},
        "b_proj": (net.heads, hidden),
    }

    def rule(name: str, shape: Shape, op: Op, *, kind: Kind = "Linear", fp32: bool = False) -> ParamMapping:
        return at.rule(f"self_attention.{name}", {f"self_attn.{name}": shape}, op, fp32=fp32, kind=kind)

    return (
        *(rule(f"{name}.weight", shape, Copy(0)) for name, shape in projections.items()),
        *(rule(f"{x}_a_proj.weight", (net.head_dim, hidden), Copy()) for x in low_ranks),
        rule("o_proj.weight", (hidden, width), Copy(1)),
        rule("o_norm.weight", (net.head_dim,), Copy()),
        *(rule(f"{x}_conv1d.weight", (width, 1, net.kernel), Copy(0), fp32=True, kind="Conv1d") for x in "qkv"),
        rule("dt_bias", (width,), Copy(0), fp32=True),
        rule("A_log", (net.heads + padding,), ZeroPadded(net.heads, padding), fp32=True),
    )

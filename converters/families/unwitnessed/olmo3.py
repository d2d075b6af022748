"""OLMo 3: norms after attention and MLP alone, q/k norms over all heads at once, three of four layers with a window.

Neither megatron-core nor Megatron-Bridge builds such layers or has names for them, so the rules have HF's on both
sides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import shortened
from converters.blocks.decoder import attention, dense_mlp, embeddings, full_qk_norms
from converters.config.dims import ModelDims, base_dims
from converters.config.values import require_flags, rope_of, sliding_layers, window_of
from converters.family import ModelFamily, Unwitnessed
from converters.rules import ParamMapping, decoder, unnamed


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of an olmo3 config. Source: transformers `Olmo3Config`, `Olmo3Attention`.

    Raises CkptkitError for heads of another size, which SGLang's class does not read.
    """
    require_flags(config, "olmo3", {"attention_bias": False})
    dims = base_dims(
        {"rms_norm_eps": 1e-5, **config},
        qkv_bias=False,
        qk_norm=True,
        qk_norm_full=True,
        window=window_of(config, absent=4096),
        window_layers=sliding_layers(config, 4),
    )
    if dims.heads * dims.head_dim != dims.hidden:
        raise CkptkitError(
            f"config.json: olmo3 with head_dim {shortened(config.get('head_dim'))} is not supported",
            "SGLang takes the hidden size divided by the heads; no released model has another",
            code="unsupported",
        )
    return dims


def mappings(dims: ModelDims) -> tuple[ParamMapping, ...]:
    """All tensors of an olmo3 model: attention without the norm before it, and a norm after the MLP."""
    last = decoder(dims, dims.all_layers).rule("", {"post_feedforward_layernorm.weight": (dims.hidden,)})
    return unnamed((*embeddings(dims), *attention(dims)[1:], *full_qk_norms(dims), *dense_mlp(dims), last))


def _unlike_transformers(config: Mapping[str, Any], tokens: int) -> str | None:
    """transformers 5 gives YaRN to the layers with a window too, from the first token on.

    Its own class says that they have none, as OLMo 3's report does; vLLM and SGLang give them none. Run: 5.12.1.
    """
    if rope_of(config)["rope_type"] == "default" or not read_dims(config).window_layers:
        return None
    return "transformers scales rotary embedding in layers with a window too (transformers#45945)"


FAMILIES = (
    ModelFamily(
        ("olmo3",),
        ("Olmo3ForCausalLM",),
        read_dims,
        mappings,
        unlike_transformers=_unlike_transformers,
        unwitnessed=Unwitnessed("its layers have norms after attention and MLP alone, Megatron's before them", None),
    ),
)

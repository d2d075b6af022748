"""DeepSeek-V4's attention, which sees compressed keys of earlier tokens, as a config says it.

Source: transformers `DeepseekV4Config`, SGLang `models/deepseek_v4.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import shortened
from converters.config.values import integer

WINDOW, SPARSE, DENSE = 0, 4, 128  # tokens behind one compressed key; 0: attention sees a window alone
# transformers' words for them.
_KINDS = {
    "sliding_attention": WINDOW,
    "compressed_sparse_attention": SPARSE,
    "heavily_compressed_attention": DENSE,
}
_RATES = {kind: ratio for kind, ratio in _KINDS.items() if ratio}


@dataclass(frozen=True)
class CompressedAttention:
    """Ranks of both compressed projections, groups of heads in the output projection, and the indexer's heads.

    `ratios`: for each layer how many tokens are behind a compressed key.
    """

    query_rank: int
    output_rank: int
    output_groups: int
    index_heads: int
    index_dim: int
    ratios: tuple[int, ...]

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if name != "ratios" and size <= 0:
                raise CkptkitError(f"config.json: {name} must be positive, not {size}", "compare it with the release")

    def layers(self, *ratios: int) -> tuple[int, ...]:
        """The layers that have one of these ratios."""
        return tuple(layer for layer, ratio in enumerate(self.ratios) if ratio in ratios)


def read_compressed(config: Mapping[str, Any]) -> CompressedAttention:
    """Sizes and layers of the attention.

    Raises CkptkitError for ratios that no release has, and where both spellings of them disagree.
    """
    heads, groups = integer(config, "num_attention_heads"), integer(config, "o_groups")
    if groups < 1 or heads % groups:
        raise CkptkitError(
            f"config.json: {heads} attention heads do not divide into {groups} groups (o_groups)",
            "compare both with the release",
        )
    return CompressedAttention(
        query_rank=integer(config, "q_lora_rank"),
        output_rank=integer(config, "o_lora_rank"),
        output_groups=groups,
        index_heads=integer(config, "index_n_heads"),
        index_dim=integer(config, "index_head_dim"),
        ratios=_ratios(config),
    )


def _ratios(config: Mapping[str, Any]) -> tuple[int, ...]:
    """`compress_ratios` of the releases, or `layer_types` and `compress_rates` of transformers."""
    rates = config.get("compress_rates") or _RATES
    if rates != _RATES:
        raise CkptkitError(
            f"config.json: compress_rates {shortened(rates)} is not supported",
            f"the releases have {list(_RATES.values())}",
            code="unsupported",
        )
    layers = integer(config, "num_hidden_layers")
    found = {key: config[key] for key in ("compress_ratios", "layer_types") if config.get(key) is not None}
    if not found:
        raise CkptkitError("config.json has no 'compress_ratios'", "a deepseek_v4 config must state it")
    several = {key: _of_layers(key, value, layers) for key, value in found.items()}
    if len({ratios[:layers] for ratios in several.values()}) > 1:
        raise CkptkitError(
            f"config.json: {' and '.join(several)} name different attention for the same layer",
            "SGLang and vLLM read the first, transformers the second; make them agree",
        )
    ratios = next(iter(several.values()))
    if any(ratios[layers:]):
        raise CkptkitError(
            "config.json: compress_ratios of a multi-token prediction layer other than 0 are not supported",
            "the releases have 0, and SGLang builds no other",
            code="unsupported",
        )
    return ratios[:layers]


def _of_layers(key: str, value: Any, layers: int) -> tuple[int, ...]:
    """The ratio of every layer, and of the multi-token prediction layers behind them where it is stated."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) < layers:
        raise CkptkitError(
            f"config.json: {key} is {shortened(value)}, not a list for {layers} layers", "compare it with the release"
        )
    known = list(_KINDS if key == "layer_types" else _KINDS.values())
    if odd := [one for one in value if one not in known or type(one) is bool]:
        raise CkptkitError(
            f"config.json: {key} {shortened(odd[0])} is not supported", f"known: {known}", code="unsupported"
        )
    return tuple(_KINDS[one] if key == "layer_types" else one for one in value)

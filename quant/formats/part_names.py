"""Names of the tensors that store a quantized weight. Imports no torch.

INT4 (compressed-tensors) replaces `N.weight` by `N.weight_packed`, `N.weight_scale`, `N.weight_shape`,
`N.weight_zero_point` if the grid is asymmetric, and `N.weight_g_idx` if columns were reordered. FP8 keeps `N.weight`
and adds `N.weight_scale_inv` or `N.weight_scale`. MXFP4 (gpt-oss) replaces `N` by `N_blocks` and `N_scales`.
`ckptkit.quant.formats.floats.layout` has all spellings of floats.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

WEIGHT_PACKED, WEIGHT_SCALE, WEIGHT_SHAPE = "weight_packed", "weight_scale", "weight_shape"
WEIGHT_ZERO_POINT, WEIGHT_G_IDX = "weight_zero_point", "weight_g_idx"
INT4_PARTS = (WEIGHT_PACKED, WEIGHT_SCALE, WEIGHT_SHAPE, WEIGHT_ZERO_POINT, WEIGHT_G_IDX)
# The same after a module's name.
PACKED, SCALE, SHAPE, ZERO_POINT, G_IDX = INT4_ENDINGS = tuple(f".{part}" for part in INT4_PARTS)

FP8_SCALE_INV, FP8_SCALE = "_scale_inv", "_scale"  # after the weight's own name
WEIGHT_SCALE_INV = f"weight{FP8_SCALE_INV}"
# NVFP4's scale of a tensor (ModelOpt; compressed-tensors), and scales of activations.
SCALE_2, GLOBAL_SCALE = "_scale_2", "_global_scale"
INPUT_SCALES = (".input_scale", ".activation_scale")
MISTRAL_SCALE, MISTRAL_INPUT = ".qscale_weight", ".qscale_act"
MXFP4_BLOCKS, MXFP4_SCALES = "_blocks", "_scales"  # after the name of the experts' matrix


def packed_in(names: Iterable[str]) -> Iterator[str]:
    """Yields the modules with a `weight_packed` among these names."""
    return (name.removesuffix(PACKED) for name in names if name.endswith(PACKED))


def unpacked_name(name: str) -> str:
    """Returns `N.weight` for `N.weight_packed`, and any other name unchanged."""
    return f"{name.removesuffix(PACKED)}.weight" if name.endswith(PACKED) else name

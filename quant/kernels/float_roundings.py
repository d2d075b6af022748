"""The formulas of writers of FP8, MXFP4 and NVFP4 checkpoints for the scale of a block, from its largest weight.

All give the same error, but different bits: more than half of the scales differ in the last place. Only a tool's own
formula reproduces the bytes of its files, or of its updates of an engine. A weight's code is weight / scale, or weight
x (1 / scale), rounded half to even to float8_e4m3fn or E2M1; all in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from ckptkit.quant.formats.floats.layout import E2M1, E4M3, LARGEST

MAX_VALUE = LARGEST[E4M3]
_INVERSE = 1 / 448  # a factor, rounded to float32: CUDA replaces division by a number with it
_EXPONENT, _MANTISSA = 0x7F800000, 0x007FFFFF
_HALF_OF_THE_SMALLEST = 0x00400000  # 2^-127 as bits, half of the smallest normal float32
_LARGEST_FP4_EXPONENT = 252
_LARGEST_CODE = LARGEST[E2M1]
_SMALLEST_SCALE = 2.0**-9  # of float8_e4m3fn
_ZERO_GROUP_SCALE = 0.125  # instead of a scale that compressed-tensors rounds to zero


class Fp8Weight(NamedTuple):
    """Codes and scales [blocks down, blocks across] in the dtype of the formula.

    Codes are float8_e4m3fn [rows, columns], or E2M1: uint8 [rows, columns / 2], the even column in the low half.
    """

    codes: Tensor
    scales: Tensor


def blocks_of(shape: Sequence[int], block: tuple[int, int | None]) -> tuple[int, int]:
    """Scales down and across of a matrix [rows, columns]."""
    rows, columns = shape
    return -(-rows // block[0]), -(-columns // (block[1] or max(columns, 1)))


@dataclass(frozen=True)
class Rounding:
    """A writer's formula.

    `scales` computes the stored scales and the float32 factors of weights from the largest absolute weights of blocks,
    in the weight's dtype. In NVFP4 it has another argument, the result of `shared` for the largest absolute weight []
    of all tensors that share a scale: that scale as stored, float32, [] or [1].
    """

    scales: Callable[..., tuple[Tensor, Tensor]]
    divides: bool = False  # weights are divided by factors, not multiplied
    in_weight_dtype: bool = False  # a quotient is rounded to the weight's dtype before it becomes a code
    four_bit: bool = False  # codes are E2M1, not float8_e4m3fn
    shared: Callable[[Tensor], Tensor] | None = None


def _slime(largest: Tensor) -> tuple[Tensor, Tensor]:
    scale = _divided(_at_least_tiny(largest))
    return scale, scale


def _slime_cuda(largest: Tensor) -> tuple[Tensor, Tensor]:
    scale = _at_least_tiny(largest) * _INVERSE
    return scale, scale


def _online(largest: Tensor) -> tuple[Tensor, Tensor]:
    scale = largest.float().clamp(min=1e-10) * _INVERSE
    return scale, scale.reciprocal()


def _transformers(largest: Tensor) -> tuple[Tensor, Tensor]:
    # A number divided by a tensor is its reciprocal times the number in torch: two roundings.
    inverse = largest.float().reciprocal() * MAX_VALUE
    # A block of zeros, or of numbers so small that transformers itself would store NaN, has a scale of 1.
    inverse = torch.where(inverse.isinf(), 1.0, inverse)
    return inverse.reciprocal(), inverse


def _deepgemm(largest: Tensor) -> tuple[Tensor, Tensor]:
    above = _divided(largest.float().clamp(min=1e-4)).view(torch.int32) + _MANTISSA
    scale = (above & _EXPONENT).view(torch.float32)
    return scale, scale.reciprocal()


def _compressed_tensors(largest: Tensor) -> tuple[Tensor, Tensor]:
    scale = _divided(largest.float()).to(largest.dtype)
    scale = torch.where(scale == 0, torch.finfo(largest.dtype).eps, scale)
    return scale, scale.float()


def _modelopt(largest: Tensor) -> tuple[Tensor, Tensor]:
    # Transformer Engine `float_to_e8m0`: up to the next power of two, stored as the exponent of float8_e8m0fnu.
    bits = (largest.float() * _INVERSE).view(torch.int32)
    exponent = bits.masked_fill_(bits <= _HALF_OF_THE_SMALLEST, 0).add_(_MANTISSA).bitwise_right_shift_(23)
    stored = exponent.to(torch.uint8)
    return stored, exponent.neg_().add_(254).bitwise_left_shift_(23).view(torch.float32)


def _mxfp4(largest: Tensor) -> tuple[Tensor, Tensor]:
    # compressed-tensors `generate_mx_scales`: the power of two of the largest weight, or above a mantissa of 1.75 the
    # next one, becomes 4. Beyond exponent 252 the largest code would be infinite in bfloat16.
    bits = largest.float().view(torch.int32) + 0x00200000
    exponent = bits.bitwise_right_shift_(23).sub_(2).clamp_(0, _LARGEST_FP4_EXPONENT)
    powers = exponent.bitwise_left_shift(23).masked_fill_(exponent == 0, _HALF_OF_THE_SMALLEST)
    return exponent.to(torch.uint8), powers.view(torch.float32)


def _modelopt_shared(largest: Tensor) -> Tensor:
    # ModelOpt `NVFP4QTensor`. For zeros only it would be 0, and every weight NaN.
    shared = _divided(largest.float(), _LARGEST_CODE * MAX_VALUE)
    return torch.where(shared < torch.finfo(torch.float32).tiny, 1.0, shared)


def _nvfp4_modelopt(largest: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
    scale = largest.float() / (_LARGEST_CODE * shared)
    stored = torch.where(scale == 0, 1.0, scale).clamp(_SMALLEST_SCALE, MAX_VALUE).to(torch.float8_e4m3fn)
    return stored, stored.float() * shared


def _compressed_tensors_shared(largest: Tensor) -> Tensor:
    # compressed-tensors `generate_gparam`, `calculate_qparams`: in the weights' dtype. float16 overflows there.
    wide = largest.to(_wide(largest.dtype))
    inverse = wide.clamp(min=torch.finfo(wide.dtype).tiny).reciprocal() * (_LARGEST_CODE * MAX_VALUE)
    return inverse.nan_to_num(nan=1.0, posinf=1.0).float().reshape(1)


def _nvfp4_compressed_tensors(largest: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
    scale = _divided(largest.to(_wide(largest.dtype)), _LARGEST_CODE).float() * shared
    scale = scale.clamp(max=MAX_VALUE).to(torch.float8_e4m3fn).float()
    scale = torch.where(scale == 0, _ZERO_GROUP_SCALE, scale)
    return scale.to(torch.float8_e4m3fn), scale / shared


def _wide(weight: torch.dtype) -> torch.dtype:
    return torch.float32 if weight == torch.float16 else weight


def _divided(largest: Tensor, by: float = MAX_VALUE) -> Tensor:
    # The divisor is a tensor: a number is multiplied by its rounded inverse on a GPU.
    return largest / torch.full_like(largest, by)


def _at_least_tiny(largest: Tensor) -> Tensor:
    return largest.float().clamp(min=tiny(largest.dtype))


def tiny(weight: torch.dtype) -> float:
    """slime's lower bound of the largest weight of a block: 1e-12 in the weight's dtype, for float16 in float32."""
    return float(torch.tensor(1e-12, dtype=_wide(weight)))


def scale_dtype(rounding: str, weight: torch.dtype) -> torch.dtype:
    """The dtype of stored scales: float32, uint8 for exponents, or the weight's."""
    return ROUNDINGS[rounding].scales(torch.zeros(1, dtype=weight))[0].dtype


# By the value of `--rounding`, after the scheme's name for four-bit codes. Zero blocks have codes of zero, and in eight
# bits a scale that is not zero.
ROUNDINGS: Mapping[str, Rounding] = MappingProxyType(
    {
        "online": Rounding(_online),  # the Triton kernel of slime, miles and verl, which updates an engine
        # slime `tools/convert_hf_to_fp8.py` on a CPU; miles, and vLLM a channel. Its default is a GPU.
        "slime": Rounding(_slime, divides=True),
        "slime-cuda": Rounding(_slime_cuda, divides=True),
        "transformers": Rounding(_transformers),  # `Fp8Quantize`; Transformer Engine with float32 scales
        "deepgemm": Rounding(_deepgemm),  # `per_block_cast_to_fp8`: powers of two (`scale_fmt` ue8m0)
        # compressed-tensors and llm-compressor on a CPU
        "compressed-tensors": Rounding(_compressed_tensors, divides=True, in_weight_dtype=True),
        "modelopt": Rounding(_modelopt),  # MXFP8's powers of two: also Transformer Engine, miles and vLLM
        # llm-compressor, Quark and vLLM online too
        "mxfp4 compressed-tensors": Rounding(_mxfp4, divides=True, in_weight_dtype=True, four_bit=True),
        "nvfp4 modelopt": Rounding(_nvfp4_modelopt, divides=True, four_bit=True, shared=_modelopt_shared),
        "nvfp4 compressed-tensors": Rounding(
            _nvfp4_compressed_tensors, divides=True, four_bit=True, shared=_compressed_tensors_shared
        ),
    }
)

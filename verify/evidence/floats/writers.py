"""Tells which program's formula made quantized weights, by recomputing some of them from their plain source.

All formulas give weights within half a step of the source, and most of their scales differ in the last bit. All are in
float32, from the largest magnitude of a block (absmax); codes are rounded to nearest, ties to even.
Sources: slime and miles `tools/convert_hf_to_fp8.py` and `kernels/fp8_kernel.py`; DeepGEMM `per_block_cast_to_fp8`;
TransformerEngine `Float8BlockScaling`; transformers `Fp8Quantize`; compressed-tensors `calculate_qparams`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptkit.core.errors import CkptkitError
from quant.formats.floats.layout import E4M3
from quant.formats.floats.release import StoredWeight
from verify.evidence.floats.group_writers import group_formulas
from verify.evidence.floats.rounding import float_weights
from verify.evidence.folding import group_by_pattern
from verify.evidence.subject import Subject
from verify.evidence.values import source_as_hf

if TYPE_CHECKING:
    from torch import Tensor

# The scales of blocks, and what weights are divided or multiplied by, of the largest magnitude of each.
_Formula = Callable[["Tensor"], "tuple[Tensor, Tensor, bool]"]
_MAX = 448.0
_LARGEST_WEIGHT = 1 << 26  # elements of a weight that is recomputed


def _quotient(absmax: Tensor) -> tuple[Tensor, Tensor, bool]:
    scale = absmax.clamp(min=1e-12) / _MAX
    return scale, scale, True


def _product(absmax: Tensor) -> tuple[Tensor, Tensor, bool]:
    import torch

    # 1/448 rounded to float32, which is what a GPU multiplies by where the code divides by a constant.
    scale = absmax.clamp(min=1e-10) * torch.tensor(1 / _MAX, dtype=torch.float32)
    return scale, 1 / scale, False


def _reciprocal(absmax: Tensor) -> tuple[Tensor, Tensor, bool]:
    import torch

    # torch makes a product with the reciprocal of a number divided by a tensor.
    most = torch.full_like(absmax, _MAX)
    inverse = most / torch.where(absmax == 0, most, absmax)
    return torch.ones_like(inverse) / inverse, inverse, False


def _of_reciprocal(absmax: Tensor) -> tuple[Tensor, Tensor, bool]:
    import torch

    inverse = torch.where(absmax == 0, torch.ones_like(absmax), absmax.reciprocal() * _MAX)
    return inverse.reciprocal(), inverse, False


def _power(absmax: Tensor) -> tuple[Tensor, Tensor, bool]:
    import torch

    quotient = absmax.clamp(min=1e-4) / _MAX
    mantissa, exponent = torch.frexp(quotient)
    scale = torch.ldexp(torch.ones_like(quotient), exponent - (mantissa == 0.5).to(exponent.dtype))
    return scale, 1 / scale, False


FORMULAS: Mapping[str, _Formula] = {
    "absmax/448, as slime makes it offline on a CPU": _quotient,
    "absmax x (1/448), as slime, miles and verl make it on a GPU": _product,
    "1/(448/absmax), as TransformerEngine makes it": _reciprocal,
    "1/(448 x (1/absmax)), as transformers makes it, and torch code of 448 / absmax": _of_reciprocal,
    "the power of two above absmax/448, as DeepGEMM makes it": _power,
}
_ROUNDED = "absmax/448 in bfloat16, as compressed-tensors makes it"


def formulas_of(codes: Tensor, scales: Tensor, original: Tensor, block: tuple[int, int]) -> list[str]:
    """The formulas that give exactly these codes and scales of a weight.

    `codes`: float8_e4m3fn [rows, columns]. `scales`: one for each `block`, float32 or bfloat16 [down, across].
    `original`: [rows, columns], a float.
    """
    import torch

    height, width = block
    rows, columns = original.shape
    weight = torch.nn.functional.pad(original, (0, -columns % width, 0, -rows % height))
    cut = weight.reshape(weight.shape[0] // height, height, weight.shape[1] // width, width)
    absmax = cut.abs().amax((1, 3), keepdim=True)
    wanted = codes.view(torch.uint8)

    def made(quotient: Tensor) -> Tensor:
        flat = quotient.clamp(-_MAX, _MAX).to(torch.float8_e4m3fn).view(torch.uint8)
        return flat.flatten(2, 3).flatten(0, 1)[:rows, :columns]

    found = []
    for name, formula in FORMULAS.items():
        scale, factor, divides = formula(absmax.float())
        if torch.equal(scale[:, 0, :, 0], scales.float()):
            quotient = cut.float() / factor if divides else cut.float() * factor
            if torch.equal(made(quotient), wanted):
                found.append(name)
    rounded = absmax / _MAX  # in the weight's own dtype
    if original.dtype is torch.bfloat16 and torch.equal(rounded[:, 0, :, 0].float(), scales.float()):
        found += [_ROUNDED] if torch.equal(made(cut / rounded), wanted) else []
    return found


@dataclass
class Writers:
    """Of a few weights in one format, how many each formula makes exactly, and how many were recomputed."""

    formulas: Counter[str] = field(default_factory=Counter)
    looked_at: int = 0


def writers_of(subject: Subject) -> dict[str, Writers]:
    """By the name of a format, whose formula makes a few weights of each kind; of those whose formulas are known.

    Raises CkptkitError where one cannot be read.
    """
    found, source = subject.once(float_weights), source_as_hf(subject, subject.checkpoint.specs)
    wanted = {name: stored for name, stored in found.stored.items() if name in found.judged and _is_usual(stored)}
    by_format: dict[str, Writers] = {}
    for names in group_by_pattern(wanted):
        for name in dict.fromkeys((names[0], names[-1])):
            stored = wanted[name]
            try:
                read = subject.checkpoint.read(stored.needed)
                original = source.read([name])[name]
            except CkptkitError:
                continue  # CK201 names it
            one = by_format.setdefault(stored.layout.words.partition(" ")[0], Writers())
            one.formulas.update(_formulas(stored, [read[part] for part in stored.needed], original))
            one.looked_at += 1
    return by_format


def _is_usual(stored: StoredWeight) -> bool:
    shape, (height, width) = stored.shape, stored.layout.block
    if shape is None or len(shape) != 2 or shape[0] * shape[1] > _LARGEST_WEIGHT:
        return False
    return height != 1 or width is None or shape[1] % width == 0


def _formulas(stored: StoredWeight, parts: Sequence[Tensor], original: Tensor) -> list[str]:
    from quant.formats.floats.decode import as_float, values

    shape, (height, width) = stored.shape, stored.layout.block
    assert shape is not None  # `_is_usual`
    codes, scales, *second = parts
    grid = as_float(scales).reshape(stored.layout.grid(shape))
    if stored.layout.number != E4M3 or (height, width) == (1, 32):
        return group_formulas(
            stored.layout, values(stored.layout, codes), grid, second[0] if second else None, original
        )
    return formulas_of(codes, grid, original, (height or shape[0], width or shape[1]))

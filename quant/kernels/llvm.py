"""What LLVM's instructions for vectors lack: rounding to narrow floats, reductions, counted loops, and a compiled function to call.

Vectors are written out, so that no optimizer has to find them: compiling takes a few hundredths of a second, and the code is the same
whatever LLVM's heuristics do. `x` is a value or a vector of values throughout.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from llvmlite import binding, ir

I8, I16, I32, I64 = (ir.IntType(width) for width in (8, 16, 32, 64))
FLOAT, HALF = ir.FloatType(), ir.HalfType()
_BFLOAT16_CUT = 16  # bits of a float32 that bfloat16 does not have


def widened(kind: Any, x: Any) -> Any:
    """The scalar type `kind`, as a vector where `x` is one."""
    return ir.VectorType(kind, x.type.count) if isinstance(x.type, ir.VectorType) else kind


def constant(kind: Any, value: float, x: Any) -> Any:
    """A constant of the scalar type `kind`, as a vector where `x` is one."""
    shape = widened(kind, x)
    return shape([kind(value)] * shape.count) if isinstance(shape, ir.VectorType) else kind(value)


def splat(code: ir.IRBuilder, x: Any, lanes: int) -> Any:
    """A vector with the value `x` in every lane."""
    shape = ir.VectorType(x.type, lanes)
    first = code.insert_element(shape(ir.Undefined), x, I32(0))
    return code.shuffle_vector(first, shape(ir.Undefined), ir.VectorType(I32, lanes)([I32(0)] * lanes))


def pick(code: ir.IRBuilder, order: str, left: Any, right: Any) -> Any:
    """The larger (">") or the smaller ("<") of two floats, the right one when they do not compare, or of two signed integers."""
    kind = left.type.element if isinstance(left.type, ir.VectorType) else left.type
    compare = code.fcmp_ordered if kind == FLOAT else code.icmp_signed
    return code.select(compare(order, left, right), left, right)


def reduced(code: ir.IRBuilder, order: str, vector: Any) -> Any:
    """The largest (">") or the smallest ("<") lane, of a power of two of them."""
    none = vector.type(ir.Undefined)
    lanes = vector.type.count
    while lanes > 1:
        lanes //= 2
        halves = [
            ir.VectorType(I32, lanes)([I32(lane) for lane in range(start, start + lanes)]) for start in (0, lanes)
        ]
        vector = pick(code, order, *(code.shuffle_vector(vector, none, half) for half in halves))
        none = vector.type(ir.Undefined)
    return code.extract_element(vector, I32(0))


def rounded(code: ir.IRBuilder, x: Any, dtype: torch.dtype) -> Any:
    """A float32 rounded, half to even, to what `dtype` can hold; still a float32."""
    if dtype == torch.float16:
        return code.fpext(code.fptrunc(x, widened(HALF, x)), widened(FLOAT, x))
    if dtype == torch.bfloat16:
        bits = code.bitcast(x, widened(I32, x))
        odd = code.and_(code.lshr(bits, constant(I32, _BFLOAT16_CUT, x)), constant(I32, 1, x))
        bits = code.add(bits, code.add(odd, constant(I32, 0x7FFF, x)))
        return code.bitcast(code.and_(bits, constant(I32, -1 << _BFLOAT16_CUT, x)), widened(FLOAT, x))
    return x


def from_bits(code: ir.IRBuilder, bits: Any, dtype: torch.dtype) -> Any:
    """The float32 that the bits of a `dtype` mean."""
    if dtype == torch.float16:
        return code.fpext(code.bitcast(bits, widened(HALF, bits)), widened(FLOAT, bits))
    if dtype == torch.bfloat16:
        bits = code.shl(code.zext(bits, widened(I32, bits)), constant(I32, _BFLOAT16_CUT, bits))
    return code.bitcast(bits, widened(FLOAT, bits))


def to_bits(code: ir.IRBuilder, x: Any, dtype: torch.dtype) -> Any:
    """The bits of a float32 that is `rounded` to `dtype` already."""
    if dtype == torch.float16:
        return code.bitcast(code.fptrunc(x, widened(HALF, x)), widened(I16, x))
    bits = code.bitcast(x, widened(I32, x))
    return (
        code.trunc(code.lshr(bits, constant(I32, _BFLOAT16_CUT, bits)), widened(I16, bits))
        if dtype == torch.bfloat16
        else bits
    )


def loop(
    code: ir.IRBuilder,
    start: Any,
    stop: Any,
    step: int,
    body: Callable[..., Sequence[Any]],
    carried: Sequence[Any] = (),
) -> list[Any]:
    """Runs `body(index, *carried)` for every index, which returns the carried values of the next. Returns those after the last."""
    before, function = code.block, code.function
    head, inside, after = (function.append_basic_block() for _ in range(3))
    code.branch(head)
    code.position_at_end(head)
    values = [code.phi(value.type) for value in (start, *carried)]
    for value, first in zip(values, (start, *carried), strict=True):
        value.add_incoming(first, before)
    code.cbranch(code.icmp_signed("<", values[0], stop), inside, after)
    code.position_at_end(inside)
    following = [*body(*values)]
    for value, new in zip(values, [code.add(values[0], I64(step)), *following], strict=True):
        value.add_incoming(new, code.block)
    code.branch(head)
    code.position_at_end(after)
    return values[1:]


class Compiled:
    """A function of the module, compiled for this machine; calling it releases the interpreter's lock. It takes and returns int64."""

    def __init__(self, module: ir.Module, name: str) -> None:
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        module.triple = binding.get_default_triple()
        host = {"cpu": binding.get_host_cpu_name(), "features": binding.get_host_cpu_features().flatten()}
        machine = binding.Target.from_triple(module.triple).create_target_machine(**host)
        parsed = binding.parse_assembly(str(module))
        parsed.verify()
        self._engine = binding.create_mcjit_compiler(parsed, machine)  # owns the code
        self._engine.finalize_object()
        arguments = [ctypes.c_int64] * len(module.get_global(name).args)
        self._call = ctypes.CFUNCTYPE(ctypes.c_int64, *arguments)(self._engine.get_function_address(name))

    def __call__(self, *arguments: int) -> int:
        return int(self._call(*arguments))

"""Building blocks of the compiled CPU kernels: conversion, exp, a small matrix product, search.

numba has no floats of 16 or 8 bits and no explicit vectors, so these functions emit LLVM IR. Such
caches are passed as integer arrays: uint16 holds bfloat16, int16 holds float16, uint8 holds
float8_e4m3fn.
"""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"
# numba infers the argument types of compiled functions. Their docstrings give the shapes.

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
ROWS = 4  # rows per call of a product below; callers pad rows to a multiple of it
BITS = 64  # elements per call of `equal_bits`

_F32, _I32, _I16, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(16), ir.IntType(BITS)
_I8 = ir.IntType(8)
_VECTOR = ir.VectorType(_F32, LANES)
_EACH = range(LANES)
_HALVES = tuple(LANES >> n for n in range(1, LANES.bit_length()))


def as_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the memory of a CPU tensor as a numpy array, with the dtypes of this module.

    Raises:
        ValueError: for a dtype other than float32, bfloat16 and float16.
    """
    if tensor.dtype == torch.float32:
        return tensor.numpy()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy()
    if tensor.dtype == torch.float16:
        return tensor.view(torch.int16).numpy()
    raise ValueError(f"dtype {tensor.dtype} is not supported; allowed: float32, bfloat16, float16")


@intrinsic
def to_float(typingctx: Any, x: Any) -> Any:
    """Return the float32 value of an element: a float32, or the bits of a smaller float."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if x == types.float32:
            return args[0]
        if x == types.uint8:
            return _from_e4m3(builder, args[0])
        if x == types.uint16:
            wide = builder.shl(builder.zext(args[0], _I32), ir.Constant(_I32, 16))
            return builder.bitcast(wide, _F32)
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), _F32)

    return types.float32(x), codegen


def _from_e4m3(builder: Any, bits: Any, lanes: int | None = None) -> Any:
    """Emit the conversion of float8_e4m3fn: of one number, or of as many as there are ``lanes``.

    Its bits are those of a float16 whose exponent has a bias of 7 and not of 15. The bits of NaN
    give 480 as in vLLM's kernel, which never writes them.
    """

    def of(kind: Any) -> Any:
        return kind if lanes is None else ir.VectorType(kind, lanes)

    def constant(kind: Any, number: float) -> Any:
        return ir.Constant(of(kind), number if lanes is None else [number] * lanes)

    shifted = builder.shl(builder.sext(bits, of(_I16)), constant(_I16, 7))
    half = builder.and_(shifted, constant(_I16, 0xBFFF))  # the sign is there twice
    wide = builder.fpext(builder.bitcast(half, of(ir.HalfType())), of(_F32))
    return builder.fmul(wide, constant(_F32, 256.0))


@intrinsic
def from_float(typingctx: Any, x: Any, like: Any) -> Any:
    """Return `x`, rounded to the nearest element of the type of `like`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if like == types.float32:
            return args[0]
        if like == types.uint16:
            bits = builder.bitcast(args[0], _I32)
            odd = builder.and_(builder.lshr(bits, ir.Constant(_I32, 16)), ir.Constant(_I32, 1))
            rounded = builder.add(builder.add(bits, ir.Constant(_I32, 0x7FFF)), odd)
            return builder.trunc(builder.lshr(rounded, ir.Constant(_I32, 16)), _I16)
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), _I16)

    return like(types.float32, like), codegen


@intrinsic
def towards_zero(typingctx: Any, x: Any) -> Any:
    """Return `x`, a float32, rounded to a bfloat16 towards zero."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.and_(builder.bitcast(args[0], _I32), ir.Constant(_I32, -0x10000))
        return builder.bitcast(bits, _F32)

    return types.float32(types.float32), codegen


@intrinsic
def widen(typingctx: Any, dst: Any, i: Any, j: Any, src: Any, at: Any) -> Any:
    """Assign to_float(src[at : at + LANES]) to dst[i, j : j + LANES].

    dst is a contiguous float32 matrix; src has elements as in `to_float`. A loop of `to_float`
    takes five times as long if rows are short.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to, source = (
            context.make_array(signature.args[n])(context, builder, args[n]) for n in (0, 3)
        )
        columns = cgutils.unpack_tuple(builder, to.shape)[1]
        offset = builder.add(builder.mul(args[1], columns), args[2])
        element = signature.args[3].dtype
        kinds = {types.float32: _F32, types.uint16: _I16, types.uint8: _I8}
        kind = kinds.get(element, ir.HalfType())
        lanes = _load_lanes(builder, builder.gep(source.data, [args[4]]), kind)
        if element == types.uint16:
            wide = builder.zext(lanes, ir.VectorType(_I32, LANES))
            sixteen = ir.Constant(ir.VectorType(_I32, LANES), [16] * LANES)
            lanes = builder.bitcast(builder.shl(wide, sixteen), _VECTOR)
        elif element == types.uint8:
            lanes = _from_e4m3(builder, lanes, LANES)
        elif element != types.float32:
            lanes = builder.fpext(lanes, _VECTOR)
        builder.store(
            lanes, builder.bitcast(builder.gep(to.data, [offset]), _VECTOR.as_pointer()), align=4
        )
        return context.get_dummy_value()

    return types.void(dst, types.intp, types.intp, src, types.intp), codegen


@intrinsic
def row_maximum(typingctx: Any, x: Any, i: Any) -> Any:
    """Return max(x[i, : 2 * LANES]) of a contiguous float32 matrix.

    If an element is NaN, the result is NaN or another element.

    numba's loops find maxima one element at a time. The comparisons with selections used here are
    what vector units do for a maximum, also for NaN.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        first = builder.mul(args[1], cgutils.unpack_tuple(builder, array.shape)[1])
        low, high = (
            _load_lanes(
                builder,
                builder.gep(array.data, [builder.add(first, ir.Constant(first.type, half))]),
                _F32,
            )
            for half in (0, LANES)
        )
        lanes = builder.select(builder.fcmp_ordered(">", high, low), high, low)
        for width in _HALVES:
            shuffle = ir.Constant(ir.VectorType(_I32, LANES), [(n + width) % LANES for n in _EACH])
            other = builder.shuffle_vector(lanes, lanes, shuffle)
            lanes = builder.select(builder.fcmp_ordered(">", lanes, other), lanes, other)
        return builder.extract_element(lanes, ir.Constant(_I32, 0))

    return types.float32(x, types.intp), codegen


@intrinsic
def equal_bits(typingctx: Any, x: Any, at: Any, value: Any) -> Any:
    """Return x[at : at + BITS] == value as the bits of an integer, the lowest bit first.

    x is a contiguous int32 array. numba's loops do not pack the results of comparisons.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        vector = ir.VectorType(_I32, BITS)
        pointer = builder.gep(array.data, [args[1]])
        lanes = builder.load(builder.bitcast(pointer, vector.as_pointer()), align=4)
        one = builder.insert_element(
            ir.Constant(vector, ir.Undefined), args[2], ir.Constant(_I32, 0)
        )
        every = builder.shuffle_vector(one, one, ir.Constant(vector, [0] * BITS))
        return builder.bitcast(builder.icmp_signed("==", lanes, every), _I64)

    return types.uint64(x, types.intp, types.int32), codegen


@intrinsic
def highest_bit(typingctx: Any, bits: Any) -> Any:
    """Return the position of the highest bit that is set; at least one is."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        above = builder.ctlz(args[0], ir.Constant(ir.IntType(1), 1))
        return builder.sub(ir.Constant(_I64, BITS - 1), above)

    return types.int64(types.uint64), codegen


@intrinsic
def count_bits(typingctx: Any, bits: Any) -> Any:
    """Return how many bits of an integer of 32 bits are set."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.zext(builder.ctpop(args[0]), _I64)

    return types.int64(types.uint32), codegen


def _load_lanes(builder: Any, pointer: Any, element: Any) -> Any:
    vector = ir.VectorType(element, LANES)
    return builder.load(builder.bitcast(pointer, vector.as_pointer()), align=1)


@intrinsic
def _float_bits(typingctx: Any, x: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _I32)

    return types.int32(types.float32), codegen


@intrinsic
def _bits_float(typingctx: Any, x: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _F32)

    return types.float32(types.int32), codegen


_LOG2E = np.float32(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_TO_INTEGER = np.float32(1.5 * 2**23)  # adding it rounds to an integer, in the low bits
_C2, _C3, _C4 = np.float32(0.5), np.float32(1 / 6), np.float32(1 / 24)
_C5, _C6 = np.float32(1 / 120), np.float32(1 / 720)
_ONE, _ZERO, _LOWEST = np.float32(1), np.float32(0), np.float32(-87.3)


@numba.njit(fastmath={"contract"})
def exp(x):
    """Return exp of a non-positive float32: 0 below the normal range, NaN for NaN.

    Loops over it vectorise. The relative error is below 2e-7.
    """
    y = max(x, _LOWEST)
    shifted = y * _LOG2E + _TO_INTEGER
    whole = shifted - _TO_INTEGER
    f = y - whole * _LN2_HIGH - whole * _LN2_LOW
    p = _ONE + f * (_ONE + f * (_C2 + f * (_C3 + f * (_C4 + f * (_C5 + f * _C6)))))
    scaled = _bits_float(_float_bits(p) + (_float_bits(shifted) << np.int32(23)))
    return scaled if x > _LOWEST else (_ZERO if x <= _LOWEST else x)


_TANH_LIMIT = np.float32(7.90531110763549805)  # beyond it float32 has no number below 1
_A1, _A3, _A5 = map(np.float32, (4.89352455891786e-3, 6.37261928875436e-4, 1.48572235717979e-5))
_A7, _A9 = map(np.float32, (5.12229709037114e-8, -8.60467152213735e-11))
_A11, _A13 = map(np.float32, (2.00018790482477e-13, -2.76076847742355e-16))
_B0, _B2 = map(np.float32, (4.89352518554385e-3, 2.26843463243900e-3))
_B4, _B6 = map(np.float32, (1.18534705686654e-4, 1.19825839466702e-6))


@numba.njit(fastmath={"contract"})
def tanh(x):
    """Return tanh of a float32, NaN for NaN. Loops over it vectorise.

    The relative error is below 5e-7. The quotient of polynomials is that of Eigen.
    """
    y = _TANH_LIMIT if x > _TANH_LIMIT else x
    y = -_TANH_LIMIT if y < -_TANH_LIMIT else y
    s = y * y
    upper = y * (_A1 + s * (_A3 + s * (_A5 + s * (_A7 + s * (_A9 + s * (_A11 + s * _A13))))))
    return upper / (_B0 + s * (_B2 + s * (_B4 + s * _B6)))


def _product(vectors: int) -> Any:
    """Return an intrinsic for c[i : i + ROWS, j : j + W] += a[i : i + ROWS] @ b[:, j : j + W].

    W is ``vectors * LANES``. The operands are contiguous float32 matrices. The sums stay in
    registers over the whole inner dimension, which numba's loops do not achieve.
    """

    @intrinsic
    def product(typingctx: Any, c: Any, a: Any, b: Any, i: Any, j: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            vector, index = ir.VectorType(_F32, LANES), ir.IntType(64)
            c_array, a_array, b_array = (
                context.make_array(signature.args[n])(context, builder, args[n]) for n in range(3)
            )
            inner = cgutils.unpack_tuple(builder, a_array.shape)[1]

            def element(array: Any, row: Any, column: Any) -> Any:
                width = cgutils.unpack_tuple(builder, array.shape)[1]
                offset = builder.add(builder.mul(row, width), column)
                return builder.gep(array.data, [offset])

            def lanes(array: Any, row: Any, v: int) -> Any:
                column = builder.add(args[4], ir.Constant(index, v * LANES))
                return builder.bitcast(element(array, row, column), vector.as_pointer())

            def spread(x: Any) -> Any:
                undefined = ir.Constant(vector, ir.Undefined)
                first = builder.insert_element(undefined, x, ir.Constant(_I32, 0))
                zeros = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
                return builder.shuffle_vector(first, undefined, zeros)

            rows = [builder.add(args[3], ir.Constant(index, n)) for n in range(ROWS)]
            sums = [[cgutils.alloca_once(builder, vector) for _ in range(vectors)] for _ in rows]
            for n, row in enumerate(rows):
                for v in range(vectors):
                    builder.store(builder.load(lanes(c_array, row, v), align=4), sums[n][v])
            with cgutils.for_range(builder, inner, intp=index) as loop:
                right = [
                    builder.load(lanes(b_array, loop.index, v), align=4) for v in range(vectors)
                ]
                for n, row in enumerate(rows):
                    left = spread(builder.load(element(a_array, row, loop.index)))
                    for v in range(vectors):
                        term = builder.fmul(left, right[v], flags=["contract"])
                        total = builder.fadd(builder.load(sums[n][v]), term, flags=["contract"])
                        builder.store(total, sums[n][v])
            for n, row in enumerate(rows):
                for v in range(vectors):
                    builder.store(builder.load(sums[n][v]), lanes(c_array, row, v), align=4)
            return context.get_dummy_value()

        return types.void(c, a, b, types.intp, types.intp), codegen

    return product


_product_1 = _product(1)
_product_2 = _product(2)


@numba.njit
def accumulate(c, a, b):
    """Add a @ b to c.

    All are contiguous float32 matrices, and c.shape is a multiple of (ROWS, LANES).
    """
    columns = c.shape[1]
    even = columns // (2 * LANES) * (2 * LANES)
    for i in range(0, c.shape[0], ROWS):
        for j in range(0, even, 2 * LANES):
            _product_2(c, a, b, i, j)
        if even < columns:
            _product_1(c, a, b, i, even)

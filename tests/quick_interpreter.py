"""Make Triton's interpreter faster, without changing what it computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np


def quicken() -> None:
    """Let the interpreter patch Triton's language once, which it does at every launch and at every
    call of a function within a kernel; keep types; reduce by halves, not one by one; and leave out
    sums whose overflow it computes and, with ``options.debug`` off, asserts nowhere."""
    import triton.language as tl
    from triton.runtime import interpreter

    module: Any = interpreter
    for each in (tl, tl.core):
        module._patch_lang(SimpleNamespace(__globals__={"lang": each}))
    patched = SimpleNamespace(restore=lambda: None)
    module._patch_lang = lambda fn: patched
    module.ReduceOps.generic_reduce = _by_halves
    options = module.interpreter_builder.options
    if options.debug:
        raise RuntimeError("the interpreter asserts what is left out here")
    object.__setattr__(options, "sanitize_overflow", False)
    _keep_types(tl, module)


@contextmanager
def multiplied_in_order() -> Iterator[None]:
    """Let each row of a product have the same bits whatever its number.

    numpy's depend on it on some CPUs: on AMD's Zen 5 rows of one product have unlike orders.
    """
    from triton.runtime import interpreter

    stock = interpreter.InterpreterBuilder.create_dot

    def dot(*given: Any) -> Any:
        with mock.patch.object(np, "matmul", _matmul):
            return stock(*given)

    with mock.patch.object(interpreter.InterpreterBuilder, "create_dot", dot):
        yield


def _matmul(a: np.ndarray, b: np.ndarray, dtype: Any) -> np.ndarray:
    """Multiply [..., M, K] with [..., K, N] and add up in the order of K."""
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    return np.multiply(a[..., None], b[..., None, :, :], dtype=dtype).sum(axis=-2)


def _keep_types(tl: Any, interpreter: Any) -> None:
    """Make each type once, with what its tensors have of it, and compare shapes as lists."""
    of_numpy, blocks = dict[str, Any](), dict[Any, Any]()
    stock_of, semantic = interpreter._get_np_dtype, interpreter.TritonSemantic
    stock_block, stock_tensor = tl.block_type.__init__, tl.tensor.__init__
    stock_broadcast, equal = semantic.broadcast_impl_value, tl.dtype.__eq__

    def numpys(dtype: Any) -> Any:
        if dtype.name not in of_numpy:
            of_numpy[dtype.name] = stock_of(dtype)
        return of_numpy[dtype.name]

    def block(cls: Any, element_ty: Any, shape: Any) -> Any:
        sizes = tuple(each.value if isinstance(each, tl.constexpr) else each for each in shape)
        key = str(element_ty), getattr(element_ty, "address_space", None), sizes
        return blocks.setdefault(key, object.__new__(cls))

    def begin_block(self: Any, *given: Any) -> None:
        if not vars(self):
            stock_block(self, *given)

    def begin_tensor(self: Any, handle: Any, type: Any) -> None:
        if "of_tensors" not in vars(type):
            stock_tensor(self, handle, type)
            type.of_tensors = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_tensors

    def broadcast(self: Any, *pair: Any) -> Any:
        first, second = (each.type.shape.values if each.type.is_block() else None for each in pair)
        return pair if first == second else stock_broadcast(self, *pair)

    interpreter._get_np_dtype = numpys
    tl.block_type.__new__, tl.block_type.__init__ = block, begin_block
    tl.tensor.__init__ = begin_tensor
    tl.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    semantic.broadcast_impl_value = broadcast


def _by_halves(self: Any, given: Any) -> list[Any]:
    """Reduce an axis, whose length is a power of two, by calls of the combining function."""
    blocks, axis = self.unravel(given, self.axis)
    while blocks[0].handle.data.shape[axis] > 1:
        pairs = [np.split(block.handle.data, 2, axis) for block in blocks]
        halves = [
            self.to_tensor(pair[at], block.dtype)
            for at in range(2)
            for pair, block in zip(pairs, blocks, strict=True)
        ]
        found = self.combine_fn.fn(*halves)
        blocks = found if isinstance(found, tuple) else (found,)
    kept = (1,) * given[0].handle.data.ndim if self.axis is None else blocks[0].handle.data.shape
    data = [block.handle.data.reshape(kept) for block in blocks]
    if not self.keep_dims:
        data = [each.squeeze(axis if self.axis is not None else None) for each in data]
    return [
        self.to_tensor(each if each.ndim else each.item(), block.dtype)
        for each, block in zip(data, blocks, strict=True)
    ]

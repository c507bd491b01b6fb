"""Make Triton's interpreter faster, without changing what it computes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np


def quicken(*, check_overflow: bool = True) -> None:
    """Let the interpreter patch Triton's language once, which it does at every launch and at every
    call of a function within a kernel; look up a type once; and reduce by halves, not one by one.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    module: Any = interpreter
    for each in (tl, tl.core):
        module._patch_lang(SimpleNamespace(__globals__={"lang": each}))
    patched = SimpleNamespace(restore=lambda: None)
    module._patch_lang = lambda fn: patched
    of_numpy, stock = dict[str, Any](), module._get_np_dtype

    def of(dtype: Any) -> Any:
        if dtype.name not in of_numpy:
            of_numpy[dtype.name] = stock(dtype)
        return of_numpy[dtype.name]

    module._get_np_dtype = of
    module.ReduceOps.generic_reduce = _by_halves
    options = module.interpreter_builder.options
    object.__setattr__(options, "sanitize_overflow", check_overflow)


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

"""NumPy views of kernel arguments."""

# mypy: allow-untyped-defs, allow-untyped-decorators, disable-error-code=import-untyped

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numba import types
from numba.extending import intrinsic

if TYPE_CHECKING:
    import numpy.typing as npt


def optional(
    tensor: torch.Tensor | None, dtype: type[np.generic], ndim: int = 1
) -> npt.NDArray[Any]:
    """Return a view of the tensor, or an empty array of ``dtype`` and ``ndim`` for None.

    Compiled code takes an array in either case, and does not read an empty one.
    """
    if tensor is not None:
        return tensor.numpy()
    return np.empty((0,) * ndim, dtype)


def numpys(*tensors: torch.Tensor) -> tuple[npt.NDArray[Any], ...]:
    """Return views of the tensors."""
    return tuple(tensor.numpy() for tensor in tensors)


@intrinsic
def int32_pointer(typing_context, address):
    """Convert an address to a pointer to int32, in compiled code."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.int32)(address), codegen

"""Views of kernel arguments as NumPy arrays."""

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
    """The tensor's array, or an empty array of the same type for compiled code to ignore."""
    if tensor is not None:
        return tensor.numpy()
    return np.empty((0,) * ndim, dtype)


def float32_rows(kernel: str, logits: torch.Tensor) -> npt.NDArray[np.float32]:
    """Logits that a kernel edits in place; the sampler hands over a float32 copy."""
    if logits.dtype != torch.float32:
        raise TypeError(f"{kernel}: logits are {logits.dtype}, the sampler's copy is float32")
    return logits.numpy()


@intrinsic
def int32_pointer(typing_context, address):
    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.int32)(address), codegen

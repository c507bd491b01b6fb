"""Check when an engine starts that a product's rows have the same bits whatever stands beside them.

It is for `exactness` bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

TRIED = (1, 5, 31, 33, 64, 129, 320)
"""Numbers of rows, some of which kernels and their tiles end at."""

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""A layer's ``cpu_linear``: takes rows, a weight that it does not read, and a bias."""


def check_product(
    product: Callable[[torch.Tensor], torch.Tensor],
    weight: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Try a product [T, K] -> [T, N] with several numbers of rows. ``weight``: N and K.

    Raises:
        RuntimeError: if a row has other bits with other rows beside it.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(TRIED[-1], weight[1], generator=generator).to(device, dtype)
    together = product(rows)
    for count in TRIED:
        if not torch.equal(product(rows[-count:]), together[-count:]):  # sync: at start
            raise RuntimeError(
                f"dyntree.exactness='bits' cannot be kept on this {device.type.upper()}: a product "
                f"with a weight of {tuple(weight)} in {dtype} has other bits with {count} rows "
                f"than with {TRIED[-1]}; use exactness tokens"
            )

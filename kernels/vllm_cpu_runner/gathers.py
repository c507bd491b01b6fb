"""What ranks on one CPU gather from each other through shared memory."""

from __future__ import annotations

from typing import Any

import torch


def mend_gathers() -> None:
    """Let ranks gather integers, as where they choose DFlash2's candidates.

    vLLM's operator for shared memory, which needs AVX-512, takes floating-point numbers alone. It
    copies them, so integers pass it as such numbers of the same bits.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    module: Any = _CPUSHMDistributed
    stock = module.all_gather_into_tensor

    def all_gather_into_tensor(
        self: Any, output: torch.Tensor, input: torch.Tensor, group: Any = None
    ) -> None:
        if not input.is_floating_point():
            input, output = input.contiguous().view(torch.bfloat16), output.view(torch.bfloat16)
        stock(self, output, input, group)

    module.all_gather_into_tensor = all_gather_into_tensor

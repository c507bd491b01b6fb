"""Permission to use AMX.

A process may use AMX tiles only after it has asked Linux for them, and until then an instruction
that does ends it with SIGILL. oneDNN asks before its first product with tiles. vLLM 0.32's own
attention kernel does not, so that a process whose attention runs first dies. Copies of a process
inherit the permission, new programs do not.
"""

from __future__ import annotations


def ask() -> None:
    """Ask for this process, or have PyTorch and vLLM do without AMX if the system refuses."""
    import torch

    cpu = torch.cpu
    if not cpu._is_amx_tile_supported() or cpu._init_amx():
        return
    cpu._is_amx_tile_supported = lambda: False
    from vllm.logger import init_logger

    init_logger("vllm.dyntree").warning(
        "This CPU has AMX, and the system does not let this process use it: vLLM runs as on a CPU "
        "without AMX, which is slower."
    )

"""Let trees on a CPU be drawn from as many tokens as on CUDA.

The engine imports this with the option ``worker_extension_cls``.
"""

from __future__ import annotations

from dyntree_kernels.drawn import KEPT_TOKENS
from dyntree_plugin.engine.cpu.ops import CPUOps


class Extension:
    """Adds nothing; vLLM wants a class."""


CPUOps.kept_tokens = KEPT_TOKENS["cuda"]

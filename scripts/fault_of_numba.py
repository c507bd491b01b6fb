"""Report of a fault of vLLM 0.32.0 on a CPU without Triton: a worker does not start in a process
that has imported numba."""

import os

os.environ["VLLM_PLUGINS"] = ""

import numba  # noqa: F401
from vllm.platforms import current_platform

try:
    current_platform.register_triton_kernel_overrides()
except AttributeError as error:
    print("a worker would end:", error)
else:
    print("a worker would start")

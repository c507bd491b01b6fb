"""Lets vLLM run quantised weights in float32 on a CPU, and NVFP4 by its emulation.

In 16 bits ties would decide tokens, the more the fewer bits inputs are rounded to. The engine
imports this with the option ``distributed_executor_backend``, before it checks types.
"""

import torch
from vllm.model_executor.kernels.linear import EmulationNvFp4LinearKernel, register_linear_kernel
from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors
from vllm.platforms import PlatformEnum
from vllm.v1.executor.uniproc_executor import UniProcExecutor as Executor  # noqa: F401

register_linear_kernel(EmulationNvFp4LinearKernel, PlatformEnum.CPU, "nvfp4")
config = compressed_tensors.CompressedTensorsConfig
config.get_supported_act_dtypes = classmethod(lambda cls: [torch.float32])

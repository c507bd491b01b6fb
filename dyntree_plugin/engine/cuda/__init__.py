"""Trees on CUDA: vLLM's GPU worker and runner with our kernels."""

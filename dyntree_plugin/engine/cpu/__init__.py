"""Trees on the CPU: vLLM's CPU worker and runner with our kernels."""

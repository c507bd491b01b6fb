"""CUDA kernels: Triton (no compiler needed), FlashInfer's JIT, and what chooses between them."""

"""Time the kernels of this machine's GPU; without one, those of its CPU."""

import torch

if torch.cuda.is_available():
    from benchmarks.kernels.on_cuda import main
else:
    from benchmarks.kernels.on_cpu import main

main()

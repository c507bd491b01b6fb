"""Report of a fault of vLLM 0.32.0 on a CPU: Mamba-2 has no states at the ends of chunks, which a
prefix cache keeps, and ends the engine at the first prompt of two chunks."""

import torch
from vllm.model_executor.layers.mamba.ops.cpu import mamba_ssm

torch.manual_seed(0)
tokens, heads, size, state, chunk = 40, 2, 8, 16, 16
x, dt = torch.randn(tokens, heads, size), torch.randn(tokens, heads)
B, C = torch.randn(tokens, 1, state), torch.randn(tokens, 1, state)
states = mamba_ssm._mamba_chunk_scan_combined_fwd_cpu(
    x,
    dt,
    -torch.rand(heads),
    B,
    C,
    chunk,
    torch.empty_like(x),
    cu_seqlens=torch.tensor([0, tokens]),
    cu_chunk_seqlens=torch.tensor([0, 16, 32, tokens]),
    last_chunk_indices=torch.tensor([2]),
    return_intermediate_states=True,
)
print(f"{len(states)} of 3 states")

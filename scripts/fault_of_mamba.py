"""Report of a fault of vLLM 0.32.0 on a CPU: with speculation Mamba-2 starts from the wrong state.

With speculation the slots are a table [sequences, 1 + drafts], and a sequence must start from the
slot of its last accepted token.
"""

import torch
from vllm.model_executor.layers.mamba.ops.cpu.mamba_ssm import selective_state_update

torch.manual_seed(0)
sequences, tokens, heads, size, state = 4, 3, 2, 8, 16
states = torch.randn(1 + sequences * tokens, heads, size, state)
slots = torch.arange(1, 1 + sequences * tokens, dtype=torch.int32).view(sequences, tokens)
accepted = torch.tensor([2, 3, 1, 2], dtype=torch.int32)
starts = torch.arange(sequences + 1, dtype=torch.int32) * tokens
rows = sequences * tokens
x, dt = torch.randn(rows, heads, size), torch.randn(rows, heads)
B, C = torch.randn(rows, 1, state), torch.randn(rows, 1, state)
A, D = -torch.rand(heads), torch.randn(heads)


def update(states, x, dt, B, C, at, **speculation):
    out = torch.empty_like(x)
    selective_state_update(
        states,
        x,
        dt[..., None].expand_as(x),
        A[:, None, None].expand(heads, size, state),
        B,
        C,
        D[:, None].expand(heads, size),
        dt_bias=torch.zeros(heads, size),
        dt_softplus=True,
        state_batch_indices=at,
        dst_state_batch_indices=at,
        out=out,
        **speculation,
    )
    return out


# One token after the other, from the state of the last accepted token.
wanted = torch.empty_like(x)
for n in range(sequences):
    one = states[slots[n, accepted[n] - 1]][None].repeat(2, 1, 1, 1)
    for row in range(n * tokens, (n + 1) * tokens):
        of = slice(row, row + 1)
        wanted[of] = update(one, x[of], dt[of], B[of], C[of], torch.ones(1, dtype=torch.int32))

found = update(states.clone(), x, dt, B, C, slots, num_accepted_tokens=accepted, cu_seqlens=starts)
right = (found - wanted).abs().view(sequences, -1).amax(1) < 1e-5
print(f"{int(right.sum())} of {sequences} sequences right")

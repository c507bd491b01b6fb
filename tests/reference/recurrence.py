"""Trees through recurrent layers: the recurrence along every path, token by token."""

from __future__ import annotations

import torch


def along(
    path: list[int],
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    log_decay: torch.Tensor,
    *,
    delta: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the last row's output [H, V] and the state [H, K, V] after the rows of a path.

    S = exp(log_decay) S, u = beta (v - S^T k) or without ``delta`` u = beta v, then S = S + k u^T,
    and the output is S^T q. For Mamba-2, k is B, q is C, v is x and beta is dt.

    Args:
        path: rows, from the root down.
        state: [H, K, V], before the root.
        q, k: [H, n, K]; v: [H, n, V]; beta: [H, n].
        log_decay: [H, n], or of every channel [H, n, K].
    """
    out = state
    for t in path:
        state = state * log_decay[:, t].exp().view(len(state), -1, 1)
        read = torch.einsum("hkv,hk->hv", state, k[:, t]) if delta else 0
        update = beta[:, t, None] * (v[:, t] - read)
        state = state + k[:, t, :, None] * update[:, None]
        out = torch.einsum("hkv,hk->hv", state, q[:, t])
    return out, state

"""Slow, plain references for tree attention, over token-major keys and values."""

from __future__ import annotations

import torch

from dyntree_kernels.features import LayerFeatures


def masked_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    features: LayerFeatures,
) -> torch.Tensor:
    """Attend with a dense masked softmax in float64.

    Args:
        q: [n, H, D]; keys, values: [L, Hkv, D], positions in cache order.
        mask: bool [n, L], whether a row sees a position. A position that no row sees may hold
            any value.

    Returns:
        float64 [n, H, D]; zeros for a row that sees nothing.

    Raises:
        ValueError: for features that are not served.
    """
    features.check("reference")
    group = q.shape[1] // keys.shape[1]
    used = mask.any(0)
    k = keys[used].double().repeat_interleave(group, 1)
    v = values[used].double().repeat_interleave(group, 1)
    scores = torch.einsum("nhd,lhd->hnl", q.double(), k) * features.scale
    seen = mask[:, used]
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    weights = weights.masked_fill(~seen.any(1)[:, None], 0.0)
    # Zero times a value that is not finite is not zero. Such values are added separately, and only
    # to the rows that see them.
    finite = v.isfinite().flatten(1).all(1)
    out = torch.einsum("hnl,lhd->nhd", weights[:, :, finite], v[finite])
    apart = weights[:, :, ~finite, None] * v[~finite].transpose(0, 1)[:, None]
    out += apart.masked_fill(~seen[:, ~finite, None], 0.0).sum(2).transpose(0, 1)
    return out


def path_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    parents: list[int],
    features: LayerFeatures,
) -> torch.Tensor:
    """Attend from every node as the last token of a chain: the context, then its path. No mask.

    Args:
        q: [n, H, D], one row per node.
        keys, values: [ctx + n, Hkv, D], the context followed by one position per node.
        parents: parent of each node within 0..n-1, negative for a root.

    Returns:
        float64 [n, H, D].

    Raises:
        ValueError: for features that are not served.
    """
    features.check("reference")
    ctx = keys.shape[0] - len(parents)
    group = q.shape[1] // keys.shape[1]
    out = torch.empty(q.shape, dtype=torch.float64)
    for node in range(len(parents)):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        chain = [*range(ctx), *(ctx + step for step in path)]
        k = keys[chain].double().repeat_interleave(group, 1)
        v = values[chain].double().repeat_interleave(group, 1)
        scores = torch.einsum("hd,lhd->lh", q[node].double(), k) * features.scale
        out[node] = torch.einsum("lh,lhd->hd", scores.softmax(0), v)
    return out

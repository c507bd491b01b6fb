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
        q: [n, H, D]; keys: [L, Hkv, D], values: [L, Hkv, V], positions in cache order.
        mask: bool [n, L], whether a row sees a position. Of these it sees the last ones alone, as
            many as a window has; in a block, whose rows are the last positions, it sees those that
            the window has up to its own. A position that no row sees may hold any value.

    Returns:
        float64 [n, H, V]; zeros for a row that sees nothing.

    Raises:
        ValueError: for features that are not served.
    """
    features.check("reference")
    q, keys, values, group = *_widened(q, keys, values, features), q.shape[1] // keys.shape[1]
    if features.both_ways and features.window is not None:
        places = torch.arange(mask.shape[1], device=mask.device)
        mask = mask & (places > places[-len(mask) :, None] - features.window)
    elif features.window is not None:
        mask = mask & (mask.flip(1).cumsum(1).flip(1) <= features.window)
    used = mask.any(0)
    k, v = (x[used].repeat_interleave(group, 1) for x in (keys, values))
    scores = _capped(torch.einsum("nhd,lhd->hnl", q, k), features)
    seen = mask[:, used]
    weights = _weights(scores.masked_fill(~seen, float("-inf")), features)
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
        keys, values: [ctx + n, Hkv, D] and [ctx + n, Hkv, V], the context followed by one position
            per node.
        parents: parent of each node within 0..n-1, negative for a root.

    Returns:
        float64 [n, H, V].

    Raises:
        ValueError: for features that are not served.
    """
    features.check("reference")
    ctx = keys.shape[0] - len(parents)
    q, keys, values, group = *_widened(q, keys, values, features), q.shape[1] // keys.shape[1]
    out = torch.empty(*q.shape[:2], values.shape[2], dtype=torch.float64)
    for node in range(len(parents)):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        chain = [*range(ctx), *(ctx + step for step in path)][-(features.window or 0) :]
        k, v = (x[chain].repeat_interleave(group, 1) for x in (keys, values))
        scores = _capped(torch.einsum("hd,lhd->hl", q[node], k), features)
        weights = _weights(scores[:, None], features)[:, 0]
        out[node] = torch.einsum("hl,lhd->hd", weights, v)
    return out


def _widened(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, features: LayerFeatures
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values in float64, with their scales."""
    heads = keys.shape[1]
    found = []
    for x, name in ((q, "query_scale"), (keys, "key_scale"), (values, "value_scale")):
        scale = features.of_heads(name, heads)
        factors = torch.ones(heads) if scale is None else scale
        factors = factors.repeat_interleave(x.shape[1] // heads)[:, None]
        found.append(x.double() * factors.to(x.device, torch.float64))
    return found[0], found[1], found[2]


def _capped(products: torch.Tensor, features: LayerFeatures) -> torch.Tensor:
    scores, cap = products * features.scale, features.soft_cap
    return scores if cap is None else cap * (scores / cap).tanh()


def _weights(scores: torch.Tensor, features: LayerFeatures) -> torch.Tensor:
    """Return the softmax of scores [H, n, L] that a head's sink takes a share of."""
    if features.sinks is None:
        return scores.softmax(-1)
    sinks = features.sinks.to(scores)[:, None, None].expand(-1, scores.shape[1], 1)
    return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]

"""Tree attention in two passes: the context by the fastest kernel there is, then the tree.

The context, which every row sees, needs no mask, so kernels without one serve it: FlashAttention 3
on Hopper is faster than anything that takes a mask. The second pass starts its softmax from the
first one's result instead of merging two results. It pays where attention is bound by arithmetic,
from about 256 rows per KV head on.
"""

from __future__ import annotations

from typing import Protocol

import torch

from dyntree_kernels.cuda.attention import tree_attention
from dyntree_kernels.features import LayerFeatures


class ContextAttention(Protocol):
    """Attention of all rows over their requests' first ctx_lens positions, without a mask.

    Writes `out` [T, H, D] and `lse` float32 [T, H], the natural logarithm of the softmax
    denominators. What it writes for a request with an empty context or without a tree is ignored
    or, in the latter case, final.
    """

    def __call__(self, out: torch.Tensor, lse: torch.Tensor) -> None: ...


def two_pass_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    ctx_lens: torch.Tensor,
    qo_indptr: torch.Tensor,
    ancestor_bits: torch.Tensor,
    out: torch.Tensor,
    features: LayerFeatures,
    context: ContextAttention,
    *,
    max_rows: int | None = None,
) -> None:
    """As `dyntree_kernels.cuda.attention.tree_attention`, with `context` for the context.

    The context's result is rounded to the dtype of `out` between the passes.
    """
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    context(out, lse)
    tree_attention(
        q, kv_cache, block_table, ctx_lens, qo_indptr, ancestor_bits, out, features, lse=lse,
        seeded=True, max_rows=max_rows,
    )  # fmt: skip

"""Tree attention by xFormers with a dense bias: what the other kernels are compared with.

It gathers every request's cache and masks it with a bias of rows × positions, so it is slow and
waits for the device; it also serves GPUs that the others do not.
"""

# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

import torch

_ALIGNMENT = 8  # elements; what xFormers' kernels want of the rows of a bias


def tree_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    ctx_lens: torch.Tensor,
    qo_indptr: torch.Tensor,
    ancestor_bits: torch.Tensor,
    out: torch.Tensor,
    scale: float,
) -> None:
    """As `dyntree_kernels.cuda.attention.tree_attention`, without its options.

    Raises:
        RuntimeError: where xFormers has no operator for these tensors.
    """
    from xformers.ops import memory_efficient_attention

    bounds, lengths = qo_indptr.tolist(), ctx_lens.tolist()  # sync: no engine serves with it
    for r, ctx in enumerate(lengths):
        rows = slice(bounds[r], bounds[r + 1])
        if ctx < 0 or rows.start == rows.stop:
            continue
        keys, values, bias = dense_request(
            kv_cache, block_table[r], ctx, ancestor_bits[rows], q.shape[1], q.dtype
        )
        try:
            result = memory_efficient_attention(q[None, rows], keys, values, bias, scale=scale)
        except NotImplementedError as error:
            raise RuntimeError(
                f"xFormers has no operator for {q.dtype}, head size {q.shape[2]} on {q.device}"
            ) from error
        out[rows] = result[0]


def dense_request(
    kv_cache: torch.Tensor,
    table: torch.Tensor,
    ctx: int,
    ancestor_bits: torch.Tensor,
    heads: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values [1, L, H, D] that some row sees, and their bias [1, H, n, L]."""
    shifts = torch.arange(32, device=table.device, dtype=torch.int32)
    tree = ((ancestor_bits.unsqueeze(-1) >> shifts) & 1).flatten(1).bool()
    columns = tree.any(0).nonzero().flatten()
    context = torch.arange(ctx, device=table.device)
    position, block_size = torch.cat([context, ctx + columns]), kv_cache.shape[2]
    found = kv_cache[table[position // block_size].long(), :, position % block_size].to(dtype)
    group = heads // kv_cache.shape[1]
    keys, values = (x.repeat_interleave(group, 1)[None] for x in found.chunk(2, -1))
    length = len(position)
    # A view of aligned rows, as xFormers asks for.
    padded = torch.zeros(
        len(tree), -(-length // _ALIGNMENT) * _ALIGNMENT, dtype=dtype, device=table.device
    )
    bias = padded[:, :length]
    bias[:, ctx:].masked_fill_(~tree[:, columns], float("-inf"))
    return keys, values, bias.expand(1, heads, -1, -1)

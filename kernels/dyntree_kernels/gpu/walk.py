"""Sample-and-match on the device: from the root to the child that carries the target's token."""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _walk(
    TOKENS, PARENTS, VALID, SAMPLED, PATH, LENGTHS, EMITTED, nodes, max_depth,
    s_tokens, s_parents, s_valid, s_sampled, NODES: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES)
    inside = node < nodes
    tokens = tl.load(TOKENS + request * s_tokens + node, mask=inside, other=-1)
    parents = tl.load(PARENTS + request * s_parents + node, mask=inside, other=-2)
    valid = tl.load(VALID + request * s_valid + node, mask=inside, other=0) != 0
    parents = tl.where(valid & inside, parents, -2)
    sampled = SAMPLED + request * s_sampled
    path, emitted = PATH + request * max_depth, EMITTED + request * (max_depth + 1)

    at = tl.full([], -1, tl.int32)
    length = tl.full([], 0, tl.int32)
    drawn = tl.load(sampled)
    tl.store(emitted, drawn)
    going = tl.full([], 1, tl.int32)
    for depth in range(max_depth):
        # After the walk has stopped, `at` is -3: nobody's parent.
        child = tl.min(tl.where((parents == at) & (tokens == drawn), node, NODES), 0)
        going = (child < NODES).to(tl.int32)
        length += going
        at = tl.where(going != 0, child, -3)
        drawn = tl.load(sampled + child + 1, mask=going != 0, other=-1)
        tl.store(path + depth, tl.where(going != 0, child, -1).to(tl.int64))
        tl.store(emitted + depth + 1, drawn)
    tl.store(LENGTHS + request, length.to(tl.int64))


def walk(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    valid: torch.Tensor,
    sampled: torch.Tensor,
    max_depth: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accept the path that the target's samples follow, one launch for all requests.

    Args:
        tokens, parents: int64 [R, N], the nodes; parent -1 is the root. Children of one node carry
            different tokens. Any order.
        valid: bool [R, N], nodes that may be accepted.
        sampled: int64 [R, N + 1], the target's draw at the root and at every node.
        max_depth: levels of the deepest tree.

    Returns:
        path int64 [R, max_depth], the accepted nodes from the root down; lengths int64 [R]; the
        emitted tokens int64 [R, max_depth + 1], the bonus token at column lengths[r]. What follows
        the last entry of a row is -1.

    Raises:
        ValueError: for shapes that do not fit each other.
    """
    requests, nodes = tokens.shape
    shapes = parents.shape, valid.shape, (requests, nodes + 1)
    if shapes != (tokens.shape, tokens.shape, sampled.shape):
        raise ValueError(
            f"tokens {tuple(tokens.shape)}, parents {tuple(parents.shape)} and valid "
            f"{tuple(valid.shape)} must be [R, N] and sampled {tuple(sampled.shape)} [R, N + 1]"
        )
    if any(x.stride(1) != 1 for x in (tokens, parents, valid, sampled)):
        raise ValueError("the rows of tokens, parents, valid and sampled must be dense")
    path = torch.empty(requests, max_depth, dtype=torch.int64, device=tokens.device)
    emitted = torch.empty(requests, max_depth + 1, dtype=torch.int64, device=tokens.device)
    lengths = torch.empty(requests, dtype=torch.int64, device=tokens.device)
    if requests:
        width = triton.next_power_of_2(nodes)
        _walk[(requests,)](
            tokens, parents, valid, sampled, path, lengths, emitted, nodes, max_depth,
            tokens.stride(0), parents.stride(0), valid.stride(0), sampled.stride(0), NODES=width,
            num_warps=max(1, min(8, width // 128)),
        )  # fmt: skip
    return path, lengths, emitted

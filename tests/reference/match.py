"""Sample-and-match (`dyntree_plugin/tree/match.py`) in plain torch, for all nodes at once."""

from __future__ import annotations

import torch

from dyntree_kernels.ancestors import pack_bits
from dyntree_plugin.tree.token_tree import Accepted


def match(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    ancestors: torch.Tensor,
    valid: torch.Tensor,
    sampled: torch.Tensor,
    max_depth: int,
) -> Accepted:
    """Accept the path that the target's samples follow.

    ``tokens``, ``parents``, ``depths``, ``valid`` [R, N] describe the nodes (children of one node
    carry different tokens); ``ancestors`` int32 [R, N + 1, words] as TokenTree.ancestors makes
    them; ``sampled`` int64 [R, N + 1] is the target's draw at the root and at every node.
    """
    agrees = valid & (tokens == sampled.gather(1, parents + 1))
    agreeing = pack_bits(torch.nn.functional.pad(agrees, (1, 0), value=True))
    # A node is accepted if it and all its ancestors agree; siblings differ, so this is one path.
    accepted = agrees & ((ancestors[:, 1:] & ~agreeing[:, None]) == 0).all(dim=2)

    num_requests, num_nodes = tokens.shape
    node = torch.arange(num_nodes, device=tokens.device).expand(num_requests, -1)
    path = torch.full((num_requests, max_depth + 1), -1, dtype=torch.int64, device=tokens.device)
    path.scatter_(1, torch.where(accepted, depths - 1, max_depth), node)
    path = path[:, :max_depth]
    rows = torch.nn.functional.pad(path + 1, (1, 0))
    return Accepted(path, accepted.sum(dim=1), sampled.gather(1, rows))

"""Sample-and-match: walk from the root to the child that equals the target's sample.

The target draws a token at every node. Starting at the root, the walk goes to the child that
carries the drawn token and stops where no child does; the token drawn there is the bonus. The
emitted tokens are the target's draws whatever the tree holds, so the rule is exact for any tree
and needs no draft probabilities.
"""

from __future__ import annotations

from typing import get_args

import torch

from dyntree_kernels.ancestors import pack_bits
from dyntree_plugin.tree.rule import RuleSpec
from dyntree_plugin.tree.shape import Sampling
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


_ANY_TREE = "the tokens are the target's own draws, whatever the tree"

SPEC = RuleSpec(
    name="match",
    summary="exact with every growth and gives the same tokens as decoding without speculation",
    exact=dict.fromkeys(get_args(Sampling), _ANY_TREE),
    biased={},
    default_for=("best",),
)

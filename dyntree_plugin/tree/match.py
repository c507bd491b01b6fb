"""Sample-and-match: walk from the root to the child that equals the target's sample.

The target draws a token at every node. Starting at the root, the walk goes to the child that
carries the drawn token and stops where no child does; the token drawn there is the bonus. The
emitted tokens are the target's draws whatever the tree holds, so the rule is exact for any tree
and needs no draft probabilities.
"""

from __future__ import annotations

from typing import get_args

from dyntree_plugin.tree.rule import RuleSpec
from dyntree_plugin.tree.shape import Sampling

_ANY_TREE = "the tokens are the target's own draws, whatever the tree"

SPEC = RuleSpec(
    name="match",
    summary="exact with every growth and gives the same tokens as decoding without speculation",
    exact=dict.fromkeys(get_args(Sampling), _ANY_TREE),
    biased={},
    default_for=("best",),
)

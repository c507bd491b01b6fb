"""What best-first trees are good for, and what a malformed tree is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from exactness import Model, grow_best, random_model

from dyntree_plugin.tree.shape import TreeShape
from dyntree_plugin.tree.token_tree import TokenTree

Path = tuple[int, ...]
VOCAB = 4


def candidates(draft: Model, shape: TreeShape, path: Path = ()) -> Iterator[tuple[Path, float]]:
    """Yield every path that the draft's best children make, with its probability."""
    code = sum(token * VOCAB**place for place, token in enumerate(reversed(path)))
    best = draft.laws[len(path)][code].topk(shape.children)
    for token, chance in zip(best.indices.tolist(), best.values.tolist(), strict=True):
        yield (*path, token), chance
        if len(path) + 1 < shape.max_depth:
            below = candidates(draft, shape, (*path, token))
            yield from ((other, chance * value) for other, value in below)


def test_no_other_tree_over_the_candidates_has_more_value() -> None:
    shape = TreeShape(node_budget=4, max_depth=3, width=3, children=2, coupling=False)
    for seed in range(20):
        draft = random_model(seed, VOCAB, shape.max_depth, zeros=0.2, sharpness=1.5)
        probability = {path: chance for path, chance in candidates(draft, shape) if chance}
        best = max(
            sum(probability[p] for p in nodes)
            for nodes in itertools.combinations(probability, shape.node_budget)
            if all(p[:-1] in nodes or len(p) == 1 for p in nodes)
        )
        tree = grow_best(shape, draft).tree
        assert float(tree.values.exp().sum()) == pytest.approx(best)


def test_a_malformed_tree_is_refused():
    two = torch.zeros(1, 2, dtype=torch.int64)
    values = torch.tensor([[-1.0, -2.0]])
    good = TokenTree(torch.tensor([[3, 4]]), two - 1, two + 1, values, torch.tensor([2]))
    good.check()
    for changed in (
        {"parents": torch.tensor([[1, -1]])},
        {"depths": torch.tensor([[1, 2]])},
        {"tokens": torch.tensor([[3, 3]])},
    ):
        with pytest.raises(ValueError, match="request 0"):
            TokenTree(**{**vars(good), **changed}).check()
    with pytest.raises(ValueError, match="counts"):
        TokenTree(**{**vars(good), "counts": torch.tensor([2, 2])})

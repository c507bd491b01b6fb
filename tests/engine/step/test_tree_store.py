"""The store of trees that wait for verification."""

from __future__ import annotations

from dataclasses import replace

import torch

from dyntree_kernels.ancestors import unpack_bits
from dyntree_kernels.contracts import DRAFT, LOOK_UP
from dyntree_plugin.engine.step.trees import TreeStore
from dyntree_plugin.tree.growth import GrowthConfig
from dyntree_plugin.tree.plan import TreePlan
from dyntree_plugin.tree.shape import TreeShape
from dyntree_plugin.tree.token_tree import NO_VALUE, TokenTree

SHAPE = TreeShape(node_budget=40, max_depth=3, width=2, children=2)
NODES = SHAPE.node_budget


def forked_tree(token: int) -> TokenTree:
    """Return a tree with nodes 0 and 1 below the root, node 2 below node 1, and padding."""
    padding = NODES - 3
    return TokenTree(
        tokens=torch.tensor([[token, token + 1, token + 2, *[0] * padding]]),
        parents=torch.tensor([[-1, -1, 1, *[-1] * padding]]),
        depths=torch.tensor([[1, 1, 2, *[1] * padding]]),
        values=torch.tensor([[-0.5, -0.7, -0.9, *[NO_VALUE] * padding]]),
        counts=torch.tensor([3]),
    )


def plan_of(shape: TreeShape, calibration: bool = False) -> TreePlan:
    return TreePlan(shape, GrowthConfig(), "match", calibration=calibration)


def store() -> TreeStore:
    return TreeStore(4, plan_of(SHAPE), 8, torch.device("cpu"))


def test_a_tree_is_stored_with_the_features_of_its_nodes_which_are_the_drafts() -> None:
    trees, slots = TreeStore(4, plan_of(SHAPE, True), 8, torch.device("cpu")), torch.tensor([2])
    candidates = torch.zeros(1, NODES, dtype=torch.int64)
    candidates[0, :3] = torch.tensor([3, 0, 2])
    trees.kinds.fill_(LOOK_UP)
    features = torch.arange(8.0).view(1, 4, 2)
    trees.put(slots, replace(forked_tree(5), candidates=candidates), features)
    assert torch.equal(trees.features[2, :3], features[0, [3, 0, 2]])
    assert (trees.kinds[2] == DRAFT).all()
    assert trees.forwards[2, :4].tolist() == [0, 0, 1, 0]


def test_the_root_of_a_slot_that_never_held_a_tree_sees_itself() -> None:
    roots = unpack_bits(store().ancestors[:, 0], NODES + 1)
    assert roots[:, 0].all()
    assert not roots[:, 1:].any()


def test_rows_of_a_stored_tree_see_the_root_themselves_and_their_ancestors() -> None:
    trees = store()
    trees.put(torch.tensor([1]), forked_tree(5))
    seen = unpack_bits(trees.ancestors[1, :4], NODES + 1)
    assert [row.nonzero().flatten().tolist() for row in seen] == [[0], [0, 1], [0, 2], [0, 2, 3]]


def test_bits_have_room_for_the_root_beside_a_full_tree() -> None:
    shape = TreeShape(node_budget=32, max_depth=32, width=1, children=1)
    trees = TreeStore(1, plan_of(shape), 8, torch.device("cpu"))
    nodes = torch.arange(32)[None]
    values = -nodes.float()
    trees.put(torch.tensor([0]), TokenTree(nodes, nodes - 1, nodes + 1, values, torch.tensor([32])))
    assert unpack_bits(trees.ancestors[0, 32], 33).all()

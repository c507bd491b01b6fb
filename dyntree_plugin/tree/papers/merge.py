"""SpecInfer's merge of the finished trees of several drafts (arXiv 2305.09781, definition 3.2): the
merged tree has a node for every path that one of them has."""

from __future__ import annotations

import torch

from dyntree_plugin.tree.token_tree import NO_VALUE, TokenTree


def merged(tree: TokenTree, levels: int) -> TokenTree:
    """Return ``tree`` with one node for each path.

    ``tree`` may have several nodes of one token below one parent, and no ``draws``. Its deepest
    nodes have depth ``levels``. A node stands where the first with its path stood, and has the
    greatest value of those with its path, and that one's number as a candidate.

    Raises:
        ValueError: if the tree has draws, which say nothing of merged nodes.
    """
    if tree.draws is not None:
        raise ValueError("drawn trees cannot be merged: rules need the distribution of each draw")
    nodes = torch.arange(tree.tokens.shape[1], device=tree.tokens.device)
    exists = nodes < tree.counts[:, None]
    same_token = (tree.tokens[:, :, None] == tree.tokens[:, None]) & exists[:, None]
    first = nodes.expand_as(tree.tokens)
    for _ in range(levels):  # after d rounds, nodes of depth d know the first of their path
        parents = _renumbered(tree.parents, first)
        alike = same_token & (parents[:, :, None] == parents[:, None])
        first = alike.int().argmax(dim=2)
    best = tree.values[:, None].masked_fill(~alike, NO_VALUE).argmax(dim=2)
    kept = exists & (first == nodes)
    places = kept.cumsum(dim=1) - 1
    target = torch.where(kept, places, len(nodes))  # dropped nodes go past the last
    candidates = tree.candidates
    return TokenTree(
        _moved(tree.tokens, target, 0),
        _moved(_renumbered(parents, places), target, -1),
        _moved(tree.depths, target, 1),
        _moved(tree.values.gather(1, best), target, NO_VALUE),
        counts := kept.sum(dim=1),
        grown=counts,
        candidates=None if candidates is None else _moved(candidates.gather(1, best), target, 0),
    )


def _renumbered(parents: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return ``parents`` [R, N] with every node j called ``numbers[r, j]``; the root stays -1."""
    return torch.where(parents < 0, -1, numbers.gather(1, parents.clamp(min=0)))


def _moved(values: torch.Tensor, target: torch.Tensor, padding: float) -> torch.Tensor:
    """Return ``values`` [R, N] at their ``target``, of which N is none."""
    room = values.new_full((values.shape[0], values.shape[1] + 1), padding)
    return room.scatter_(1, target, values)[:, :-1]

"""Shapes of trees, given as the parent of each node. The root's parent is -1."""

from __future__ import annotations

import torch


def random_tree(nodes: int, generator: torch.Generator) -> list[int]:
    picks = torch.rand(nodes, generator=generator)
    return [-1, *(int(picks[i] * i) for i in range(1, nodes))]


def chain(nodes: int) -> list[int]:
    return list(range(-1, nodes - 1))


def star(nodes: int) -> list[int]:
    return [-1] + [0] * (nodes - 1)

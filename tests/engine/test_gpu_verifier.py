"""Verification on CUDA accepts what verification elsewhere does, with the kernel's walk in torch.

The kernel itself is compared with the rule in tests/kernels.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dyntree_plugin.engine.cpu import install

install()  # the runner's modules need it before they are imported

from dyntree_plugin.engine.verifier import TreeRows, TreeVerifier  # noqa: E402
from dyntree_plugin.tree.token_tree import TokenTree  # noqa: E402

REQUESTS, NODES, DEPTH, VOCAB = 50, 12, 4, 3


def walk_in_torch(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    valid: torch.Tensor,
    sampled: torch.Tensor,
    max_depth: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    path = torch.full((len(tokens), max_depth), -1)
    emitted = torch.full((len(tokens), max_depth + 1), -1)
    for request in range(len(tokens)):
        at, length = -1, 0
        emitted[request, 0] = sampled[request, 0]
        while length < max_depth:
            drawn = sampled[request, at + 1]
            child = (parents[request] == at) & (tokens[request] == drawn) & valid[request]
            if not child.any():
                break
            at = int(child.nonzero()[0, 0])
            path[request, length] = at
            length += 1
            emitted[request, length] = sampled[request, at + 1]
    return path, (path >= 0).sum(dim=1), emitted


def trees_of(generator: torch.Generator) -> tuple[Any, torch.Tensor]:
    """Random trees in which siblings differ, as a store of them, and the nodes' tokens."""
    parents = torch.full((REQUESTS, NODES), -1)
    depths, tokens = torch.ones_like(parents), torch.zeros_like(parents)
    for request in range(REQUESTS):
        taken: set[tuple[int, int]] = set()
        for node in range(NODES):
            while True:
                parent = int(torch.randint(-1, node, (), generator=generator)) if node else -1
                token = int(torch.randint(VOCAB, (), generator=generator))
                depth = 1 if parent < 0 else int(depths[request, parent]) + 1
                if depth <= DEPTH and (parent, token) not in taken:
                    break
            taken.add((parent, token))
            parents[request, node], depths[request, node] = parent, depth
            tokens[request, node] = token
    counts = torch.full((REQUESTS,), NODES)
    tree = TokenTree(tokens, parents, depths, torch.zeros_like(tokens).float(), counts)
    shape = SimpleNamespace(max_depth=DEPTH)
    store = SimpleNamespace(parents=parents, depths=depths, ancestors=tree.ancestors(), shape=shape)
    return store, tokens


def test_the_same_paths_are_accepted_and_padding_is_a_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    from dyntree_plugin.engine.gpu import verifier

    monkeypatch.setattr(verifier, "walk", walk_in_torch)
    generator = torch.Generator().manual_seed(0)
    store, tokens = trees_of(generator)
    roots = torch.arange(REQUESTS) * (NODES + 1)
    nodes = roots[:, None] + 1 + torch.arange(NODES)
    valid = torch.rand(REQUESTS, NODES, generator=generator) < 0.8
    room = torch.full((REQUESTS,), NODES)
    rows = TreeRows(roots, nodes, roots, tokens, room, room, valid)
    sampled = torch.randint(VOCAB, (REQUESTS * (NODES + 1),), generator=generator)
    requests: Any = SimpleNamespace(slots=torch.arange(REQUESTS))

    def accepted_by(kind: type[TreeVerifier]) -> Any:
        own = object.__new__(kind)
        own.trees = store
        return own._match(rows, sampled, requests)

    ours, expected = accepted_by(verifier.GPUTreeVerifier), accepted_by(TreeVerifier)
    assert torch.equal(ours.path, expected.path)
    assert torch.equal(ours.lengths, expected.lengths)
    assert len(expected.lengths.unique()) > 2
    real = torch.arange(DEPTH + 1) <= expected.lengths[:, None]
    assert torch.equal(ours.tokens[real], expected.tokens[real])
    # The draft runs over columns behind the emitted tokens, too.
    assert ours.tokens.min() >= 0

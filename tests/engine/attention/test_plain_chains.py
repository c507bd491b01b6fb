"""Plain rows are given to the kernel of trees as chains."""

from __future__ import annotations

import itertools

import torch

from dyntree_kernels.ancestors import ancestor_bits, unpack_bits
from dyntree_plugin.engine.attention.chains import CHAIN, with_chains
from dyntree_plugin.engine.attention.metadata import TreeMask


def test_long_prompts_are_several_chains_and_trees_stay_as_they_are() -> None:
    tree = ancestor_bits(torch.tensor([[-1, 0, 0, 2]]))[0]
    rows = [4, 70, 1]
    ctx_lens = torch.tensor([9, -1, -1], dtype=torch.int32)
    bits = torch.zeros(sum(rows), 2, dtype=torch.int32)
    bits[:4, :1] = tree
    starts = torch.tensor([0, 4, 74, 75], dtype=torch.int32)
    table = torch.arange(6, dtype=torch.int32).view(3, 2)
    lengths = torch.tensor([13, 75, 8], dtype=torch.int32)
    mask = TreeMask(ctx_lens, bits, has_plain=True, same_bits=True)
    blocks, contexts, first, seen = with_chains(mask, table, starts, lengths)
    assert blocks.tolist() == [[0, 1], [2, 3], [2, 3], [2, 3], [4, 5]]
    assert contexts.tolist() == [9, 5, 5 + CHAIN, 5 + 2 * CHAIN, 7]
    assert first.tolist() == [0, 4, 4 + CHAIN, 4 + 2 * CHAIN, 74, 75]
    assert torch.equal(seen[:4], bits[:4])
    columns = unpack_bits(seen, 64)
    for begin, end in itertools.pairwise(first[1:].tolist()):
        wanted = torch.ones(end - begin, end - begin, dtype=torch.bool).tril()
        assert torch.equal(columns[begin:end, : end - begin], wanted)
        assert not columns[begin:end, end - begin :].any()

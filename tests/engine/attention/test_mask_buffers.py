"""The buffers from which captured graphs read a batch's masks."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dyntree_kernels.ancestors import ancestor_bits, unpack_bits
from dyntree_plugin.engine.attention.buffers import MaskBuffers, shared

COLUMNS, REQUESTS, ROWS = 40, 5, 300
"""Trees have up to 40 rows, whose bits take two words."""


class Operations(TorchDispatchMode):
    """Count torch's operations by name while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def buffers() -> MaskBuffers:
    return MaskBuffers(REQUESTS, ROWS, COLUMNS, torch.device("cpu"))


def batch(*rows_and_contexts: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, int]:
    rows, contexts = zip(*rows_and_contexts, strict=True)
    start = torch.tensor([0, *rows]).cumsum(0).int()
    return start, torch.tensor(rows).int() + torch.tensor(contexts).int(), int(start[-1])


def tree_bits(rows: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    parents = [-1, *(int(torch.randint(j, (), generator=generator)) for j in range(1, rows))]
    bits = ancestor_bits(torch.tensor([parents]))[0]
    return torch.nn.functional.pad(bits, (0, 2 - bits.shape[1]))


def seen(bits: torch.Tensor) -> torch.Tensor:
    return unpack_bits(bits, COLUMNS)


def causal(rows: int) -> torch.Tensor:
    return torch.ones(rows, COLUMNS, dtype=torch.bool).tril()


def test_a_request_without_a_tree_is_given_a_chain(buffers: MaskBuffers) -> None:
    start, lengths, rows = batch((1, 70), (COLUMNS, 9), (3, 0))
    ctx_lens, bits = buffers.fill(start, lengths, rows)
    assert ctx_lens.tolist() == [70, 9, 0]
    expected = torch.cat([causal(1), causal(COLUMNS), causal(3)])
    assert torch.equal(seen(bits), expected)


def test_trees_keep_their_masks_beside_plain_and_long_requests(buffers: MaskBuffers) -> None:
    start, lengths, rows = batch((40, 100), (2, 50), (90, 0), (17, 200))
    given = torch.zeros(rows, 2, dtype=torch.int32)
    trees = {0: tree_bits(40, 1), 3: tree_bits(17, 2)}
    for request, own in trees.items():
        given[start[request] : start[request + 1]] = own
    ctx_lens, bits = buffers.fill(
        start, lengths, rows, torch.tensor([100, -1, -1, 200]).int(), given
    )
    # Another kernel serves the prompt of 90 rows.
    assert ctx_lens.tolist() == [100, 50, -1, 200]
    for request, own in trees.items():
        assert torch.equal(bits[start[request] : start[request + 1]], own)
    assert torch.equal(seen(bits[40:42]), causal(2))


@pytest.mark.parametrize("all_trees", [False, True])
def test_padding_behind_the_batch_is_no_request(buffers: MaskBuffers, all_trees: bool) -> None:
    """vLLM pads for graphs with requests without rows, and with rows without a request."""
    start = torch.tensor([0, 40, 40, 40]).int()
    lengths = torch.tensor([140, 0, 0]).int()
    tree = tree_bits(40, 3)
    ctx_lens, bits = buffers.fill(
        start, lengths, 120, torch.tensor([100]).int(), tree, all_trees=all_trees
    )
    assert ctx_lens.tolist() == [100, -1, -1]
    assert torch.equal(bits[:40], tree)
    assert bits.shape == (120, 2)


def test_what_an_earlier_batch_left_is_gone(buffers: MaskBuffers) -> None:
    start, lengths, rows = batch((40, 100), (40, 60))
    both = torch.cat([tree_bits(40, 4), tree_bits(40, 5)])
    buffers.fill(start, lengths, rows, torch.tensor([100, 60]).int(), both, all_trees=True)
    ctx_lens, bits = buffers.fill(start, lengths, rows)
    assert ctx_lens.tolist() == [100, 60]
    assert torch.equal(seen(bits), torch.cat([causal(40), causal(40)]))


@pytest.mark.parametrize("all_trees", [False, True])
def test_requests_that_an_earlier_batch_had_are_padding(
    buffers: MaskBuffers, all_trees: bool
) -> None:
    many, few = batch(*[(40, 60)] * 4), batch((40, 100), (40, 90))
    trees = torch.cat([tree_bits(40, seed) for seed in range(4)])
    lens = torch.full((4,), 60).int()
    buffers.fill(*many, lens, trees, all_trees=all_trees)
    for requests in (2, 3, 4):
        start = torch.tensor([0, 40, 80, *[80] * (requests - 2)]).int()
        lengths = torch.nn.functional.pad(few[1], (0, requests - 2))
        given = torch.tensor([100, 90]).int()
        ctx_lens, _ = buffers.fill(start, lengths, 80, given, trees[:80], all_trees=True)
        assert ctx_lens.tolist() == [100, 90, *[-1] * (requests - 2)]


def test_masks_that_are_in_place_are_not_copied(buffers: MaskBuffers) -> None:
    """Control: masks from elsewhere are."""
    start, lengths, rows = batch((40, 100), (17, 60))
    trees = torch.cat([tree_bits(40, 7), tree_bits(17, 8)])
    given = torch.tensor([100, 60]).int()
    for written, copies in (((given, trees), 2), (buffers.room(2, rows), 0)):
        for place, values in zip(written, (given, trees), strict=True):
            place.copy_(values)
        with Operations() as operations:
            found = buffers.fill(start, lengths, rows, *written, all_trees=True)
        assert operations.counts["aten::copy_"] == copies
        assert all(torch.equal(a, b) for a, b in zip(found, (given, trees), strict=True))


def test_an_engines_builders_share_their_largest_buffers() -> None:
    small, large = (MaskBuffers(REQUESTS, rows, COLUMNS, torch.device("cpu")) for rows in (80, 90))
    builders: list[Any] = [SimpleNamespace(masks=each) for each in (small, large)]
    assert shared(builders) is large
    assert [each.masks for each in builders] == [large, large]
    assert shared([]) is None

"""The oracle of trees through recurrent layers, against the recurrence token by token."""

from __future__ import annotations

import pytest
import torch
from recurrent_layers import path_to, tree_states
from reference.recurrence import committed, tree_chunk
from tree_shapes import chain, random_tree, star

from dyntree_kernels.ancestors import ancestor_bits, unpack_bits
from dyntree_kernels.recurrence import Commit, inputs

HEADS, K, V = 2, 16, 24
TREES = {
    "random": random_tree(33, torch.Generator().manual_seed(1)),
    "larger": random_tree(65, torch.Generator().manual_seed(2)),
    "chain": chain(17),
    "star": star(16),
    "root": [-1],
}


def case(rows: int, *, delta: bool, strong: bool = False) -> list[torch.Tensor]:
    """Draw state, q, k, v, beta and log decays in float64."""
    g = torch.Generator().manual_seed(rows)
    state, q, k, v = (
        torch.randn(HEADS, *shape, generator=g, dtype=torch.float64)
        for shape in ((K, V), (rows, K), (rows, K), (rows, V))
    )
    if delta:
        q, k = (torch.nn.functional.normalize(each, dim=-1) for each in (q, k))
    beta = torch.rand(HEADS, rows, generator=g, dtype=torch.float64)
    decay = -torch.rand(HEADS, rows, generator=g, dtype=torch.float64) * (20 if strong else 1)
    return [state, q, k, v, beta, decay]


def along(path: list[int], given: list[torch.Tensor], *, delta: bool) -> list[torch.Tensor]:
    """Return the last output and the state of the recurrence itself."""
    state, q, k, v, beta, decay = given
    out = state
    for t in path:
        state = state * decay[:, t, None, None].exp()
        read = torch.einsum("hkv,hk->hv", state, k[:, t]) if delta else 0
        update = beta[:, t, None] * (v[:, t] - read)
        state = state + k[:, t, :, None] * update[:, None]
        out = torch.einsum("hkv,hk->hv", state, q[:, t])
    return [out, state]


def seen_of(parents: list[int]) -> torch.Tensor:
    return unpack_bits(ancestor_bits(torch.tensor([parents])), len(parents))[0]


@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("strong", [True, False])
@pytest.mark.parametrize("shape", TREES)
def test_a_chunk_is_the_recurrence_along_every_path(shape: str, strong: bool, delta: bool) -> None:
    parents = TREES[shape]
    given = case(len(parents), delta=delta, strong=strong)
    out, chunk = tree_chunk(seen_of(parents), *given, delta=delta)
    for row in range(len(parents)):
        path = path_to(row, parents)
        right, state = along(path, given, delta=delta)
        torch.testing.assert_close(out[:, row], right, rtol=1e-11, atol=1e-11)
        found = committed(given[0], torch.tensor(path), given[2], chunk)
        torch.testing.assert_close(found, state, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("delta", [True, False])
def test_rows_taken_for_a_chain_or_for_children_of_another_differ(delta: bool) -> None:
    parents = TREES["random"]
    given = case(len(parents), delta=delta)
    right, _ = tree_chunk(seen_of(parents), *given, delta=delta)
    moved = [*parents[:20], (parents[20] + 1) % 20, *parents[21:]]
    for wrong in (chain(len(parents)), moved):
        found, _ = tree_chunk(seen_of(wrong), *given, delta=delta)
        assert (found[:, 20] - right[:, 20]).abs().max() > 1e-2


def test_a_solve_in_float32_keeps_its_accuracy_for_keys_that_are_alike() -> None:
    parents = TREES["larger"]
    state, q, k, v, beta, decay = case(len(parents), delta=True)
    k = torch.nn.functional.normalize(k + 8 * k[:, :1], dim=-1)
    given = [state, q, k, v, beta.clamp(min=0.9), decay / 100]
    right, _ = tree_chunk(seen_of(parents), *given, delta=True)
    found, _ = tree_chunk(seen_of(parents), *(each.float() for each in given), delta=True)
    assert (found - right).abs().max() < 1e-5 * right.abs().max()


def test_parents_come_from_the_bits_and_requests_without_a_tree_are_chains() -> None:
    trees = [TREES["larger"], TREES["star"], TREES["root"], TREES["star"]]
    found = tree_states(trees, [3, 1, 4, 2], plain=(3,))
    expected, start = [], 0
    for parents in (*trees[:3], chain(16)):
        expected += [start + parent if parent >= 0 else -1 for parent in parents]
        start += len(parents)
    assert found.parents.tolist() == expected
    assert found.slots.tolist() == [3, 1, 4, 2]
    assert torch.equal(found.requests, torch.tensor([0] * 65 + [1] * 16 + [2] + [3] * 16))


def test_a_convolution_reads_the_ancestors_then_the_history() -> None:
    g = torch.Generator().manual_seed(0)
    parents = TREES["random"]
    rows, history = (torch.randn(*shape, 5, generator=g) for shape in ((33,), (9, 3)))
    trees = tree_states([parents], [6])
    found = inputs(trees.taps(4), rows, history, trees.slots[trees.requests])
    for row in range(33):
        right = torch.cat([history[6], rows[path_to(row, parents)]])[-4:]
        assert torch.equal(found[row], right)


@pytest.mark.parametrize("entries", [1, 3, 5])
def test_a_history_ends_with_the_inputs_of_the_path(entries: int) -> None:
    rows, history = torch.randn(20, 2), torch.randn(4, entries, 2)
    paths = [[4, 6, 9, 19], [3], [], [0, 1]]
    padded = torch.tensor([path + [-1] * (4 - len(path)) for path in paths])
    slots, none = torch.tensor([2, 0, 3, 1]), torch.zeros(4).long()
    commit = Commit(slots, padded, torch.tensor([4, 1, 0, 2]), none, none)
    found = inputs(commit.taps(entries), rows, history, commit.slots)
    for request, path in enumerate(paths):
        before = history[commit.slots[request]]
        assert torch.equal(found[request], torch.cat([before, rows[path]])[-entries:])

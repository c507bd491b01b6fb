"""Trees through recurrent layers on the CPU, against decoding token by token."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import recurrent_layers
import torch
from recurrent_layers import KINDS, Decoder, path_to, tree_states
from reference.recurrence import along
from tree_shapes import chain, random_tree, star

from dyntree_kernels.cpu.recurrence import gated_delta_rule, sequences, trees
from dyntree_kernels.cpu.tree_layers import PathCommit, TreeForward
from dyntree_kernels.recurrence import Commit

FLOAT, HALF = torch.float32, torch.bfloat16
LAYERS = [(kind, dtype) for kind in KINDS for dtype in (FLOAT, HALF)]
SLOTS = 7
END_SLOTS = [2, 3, 5]
"""Of three requests, where the states at the ends of their blocks are kept."""
OTHER = 1e-2
"""States that are further apart are others."""


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def shapes(nodes: int) -> list[list[int]]:
    g = generator(nodes)
    return [random_tree(nodes + 1, g), star(nodes + 1), [-1], random_tree(nodes // 2 + 1, g)]


def by_decoding(
    made: Decoder, path: list[int], slot: int, raw: torch.Tensor, gates: torch.Tensor
) -> torch.Tensor:
    """Return the outputs of the rows of a path, which the layer decodes."""
    at = torch.tensor([slot])
    return torch.cat([made.decode(raw[[row]], gates[[row]], at) for row in path])


def check(found: torch.Tensor, right: torch.Tensor) -> None:
    """Compare outputs: float32 to its rounding, bfloat16 to one in a hundred values."""
    if right.dtype == FLOAT:
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
        return
    assert float((found == right).float().mean()) > 0.99
    torch.testing.assert_close(found, right, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("kind", "dtype"), LAYERS)
@pytest.mark.parametrize("nodes", [15, 64])
def test_every_row_of_a_tree_is_what_decoding_its_path_gives(
    kind: str, dtype: torch.dtype, nodes: int
) -> None:
    made = recurrent_layers.make(kind, dtype, SLOTS, generator())
    parents, slots = shapes(nodes), [5, 2, 1, 6]
    states = tree_states(parents, slots, plain=(3,))
    raw, gates = made.rows(len(states.parents), generator(1))
    before = made.copies()
    out = TreeForward(states)(made.layer, raw, gates)
    assert torch.equal(made.states, before[0])
    assert torch.equal(made.layer.history, before[1])
    found, right = [], []
    for request, each in enumerate([*parents[:3], chain(len(parents[3]))]):
        start = int(states.starts[request])
        for leaf in {*range(len(each))} - {*each}:
            path = [start + place for place in path_to(leaf, each)]
            right.append(by_decoding(made, path, slots[request], raw, gates))
            found.append(out[path])
            made.restore(before)
    check(torch.cat(found), torch.cat(right))


def run_steps(made: Decoder, alter: Callable[[Commit, list[list[int]]], Commit | None]) -> float:
    """Commit 64 steps of random paths, altered, or as many as give other states; return the largest
    difference of any state or history to decoding the paths."""
    g, slots = generator(3), [4, 1, 6]
    of_slots = [each for each in (made.layer.history, made.states) if each.numel()]
    kept = made.copies()
    right, apart = made.copies(), 0.0
    for step in range(64):
        parents = [random_tree(9, g) for _ in slots]
        states = tree_states(parents, slots)
        raw, gates = made.rows(len(states.parents), g)
        ends = [int(torch.randint(9, (1,), generator=g)) for _ in slots]
        own = [path_to(end, each) for end, each in zip(ends, parents, strict=True)]
        if step % 5 == 0:
            own[1] = []  # such as a prompt's chunk
        paths = [[9 * r + row for row in path] for r, path in enumerate(own)]
        padded = torch.tensor([path + [-1] * (9 - len(path)) for path in paths])
        lengths = torch.tensor([len(path) for path in paths])
        ends = [(step + r) % 6 - 1 for r in range(len(slots))]
        commit = Commit(
            torch.tensor(slots), padded, lengths, torch.tensor(ends), torch.tensor(END_SLOTS)
        )
        altered = alter(commit, parents)
        made.restore(kept)
        if altered is not None:
            PathCommit(altered)(made.layer, raw, gates, of_slots)
        kept = made.copies()
        made.restore(right)
        for slot, path, end, end_slot in zip(slots, paths, ends, END_SLOTS, strict=True):
            if 0 < end <= len(path):
                by_decoding(made, path[:end], slot, raw, gates)
                for each in of_slots:
                    each[end_slot] = each[slot]
                path = path[end:]
            if path:
                by_decoding(made, path, slot, raw, gates)
        right = made.copies()
        pairs = zip(kept, right, strict=True)
        apart = max(float((x - y).abs().max()) if x.numel() else 0.0 for x, y in pairs)
        if apart > OTHER:
            break
    return apart


@pytest.mark.parametrize(("kind", "dtype"), LAYERS)
def test_after_64_steps_of_random_paths_the_states_are_those_of_decoding(
    kind: str, dtype: torch.dtype
) -> None:
    made = recurrent_layers.make(kind, dtype, SLOTS, generator())
    assert run_steps(made, lambda commit, _: commit) == 0


def of_a_sibling(commit: Commit, parents: list[list[int]]) -> Commit:
    """Replace the last row of the first path by another child of its parent, if there is one."""
    paths, last = commit.paths.clone(), int(commit.lengths[0]) - 1
    row = int(paths[0, last])
    others = [i for i, p in enumerate(parents[0]) if p == parents[0][row] and i != row]
    if others:
        paths[0, last] = others[0]
    return commit._replace(paths=paths)


def doubled(commit: Commit, _: list[list[int]]) -> Commit:
    paths = torch.cat([commit.paths, torch.full_like(commit.paths, -1)], dim=1)
    for request, length in enumerate(commit.lengths.tolist()):
        paths[request, length : 2 * length] = paths[request, :length]
    return commit._replace(paths=paths, lengths=2 * commit.lengths)


BROKEN: dict[str, Callable[[Commit, list[list[int]]], Commit | None]] = {
    "none": lambda *_: None,
    "twice": doubled,
    "of a sibling": of_a_sibling,
    "the root alone": lambda commit, _: commit._replace(lengths=commit.lengths.clamp(max=1)),
    "no end of a block": lambda commit, _: commit._replace(ends=0 * commit.ends),
    "ends of blocks a row late": lambda commit, _: commit._replace(ends=commit.ends + 1),
    "into a neighbour's slot": lambda commit, _: commit._replace(slots=commit.slots.roll(1)),
}


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("kind", KINDS)
def test_another_commit_gives_other_states(kind: str, broken: str) -> None:
    made = recurrent_layers.make(kind, FLOAT, SLOTS, generator())
    assert run_steps(made, BROKEN[broken]) > OTHER


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_other_trees_have_other_outputs(kind: str) -> None:
    made = recurrent_layers.make(kind, FLOAT, SLOTS, generator())
    parents = random_tree(17, generator(5))
    right_states = tree_states([parents], [2])
    raw, gates = made.rows(17, generator(1))
    right = TreeForward(right_states)(made.layer, raw, gates)
    moved = [*parents[:9], (parents[9] + 1) % 9, *parents[10:]]
    for wrong in (chain(17), moved):
        found = TreeForward(tree_states([wrong], [2]))(made.layer, raw, gates)
        assert float((found[9] - right[9]).abs().max()) > 1e-2
    other = TreeForward(tree_states([parents], [3]))(made.layer, raw, gates)
    assert float((other[0] - right[0]).abs().max()) > 1e-2


@pytest.mark.parametrize("kind", ["gdn", "mamba2"])
def test_a_sibling_in_the_convolution_changes_what_follows(kind: str) -> None:
    made = recurrent_layers.make(kind, FLOAT, SLOTS, generator())
    states = tree_states([[-1, 0, 0, 2, 3]], [2])
    raw, gates = made.rows(5, generator(1))
    right = TreeForward(states)(made.layer, raw, gates)

    def convolve(windows: torch.Tensor) -> torch.Tensor:
        windows[3, 2] = raw[1]  # in place of its parent, row 2
        return made.layer.convolve(windows)

    found = TreeForward(states)(made.layer._replace(convolve=convolve), raw, gates)
    assert torch.equal(found[:3], right[:3])
    assert float((found[3] - right[3]).abs().max()) > 1e-2
    assert float((found[4] - right[4]).abs().max()) > 1e-3


def test_a_sequence_in_one_call_is_the_same_in_several() -> None:
    made = recurrent_layers.make("gdn", FLOAT, SLOTS, generator())
    assert made.layer.through is not None
    raw, gates = made.rows(12, generator(1))
    before = made.copies()
    slots = torch.tensor([3, 1])
    whole = made.layer.through(raw, gates, sequences(slots, torch.tensor([0, 7, 12])))
    after = made.states.clone()
    made.restore(before)
    parts = [
        made.layer.through(raw[i:j], gates[i:j], sequences(slots[[s]], torch.tensor([0, j - i])))
        for s, i, j in ((0, 0, 4), (0, 4, 7), (1, 7, 8), (1, 8, 12))
    ]
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(made.states, after)


@pytest.mark.parametrize("by_channel", [False, True])
def test_the_gated_delta_rule_is_the_recurrence_along_every_path(by_channel: bool) -> None:
    g, rows = generator(), 33
    parents = random_tree(rows, g)
    q, k = (torch.randn(rows, 2, 32, generator=g) for _ in range(2))
    v = torch.randn(rows, 4, 48, generator=g)
    a, b = (torch.randn(rows, 4, generator=g) for _ in range(2))
    a_log, bias = (torch.randn(4, generator=g) for _ in range(2))
    states = torch.randn(3, 4, 32, 48, generator=g)
    order = trees(tree_states([parents], [2]))
    decay = -a_log.double().exp() * torch.nn.functional.softplus(a.double() + bias)
    beta = b.double().sigmoid()
    given: tuple[torch.Tensor | None, ...] = a, b, a_log, bias
    if by_channel:
        decay = decay[..., None] * torch.rand(rows, 4, 32, generator=g)
        given = decay.float(), beta.float(), None, None
    found = gated_delta_rule(order, states, q, k, v, *given)

    def unit(x: torch.Tensor) -> torch.Tensor:
        scaled = x.double() * (x.double().square().sum(-1, keepdim=True) + 1e-5).rsqrt()
        return scaled.transpose(0, 1).repeat_interleave(2, 0)

    for row in range(rows):
        right, _ = along(
            path_to(row, parents), states[2].double(), unit(q) * 32**-0.5, unit(k),
            v.double().transpose(0, 1), beta.T, decay.transpose(0, 1), delta=True,
        )  # fmt: skip
        torch.testing.assert_close(found[row].double(), right, rtol=1e-5, atol=1e-5)

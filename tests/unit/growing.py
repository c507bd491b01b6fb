"""A draft model over a few tokens, and a driver that grows as the engine does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from reference.growths import Draft, Draw, Path, Slot

from dyntree_kernels.ancestors import unpack_bits
from dyntree_plugin.tree.children import drawn_children, sampled_children, top_children
from dyntree_plugin.tree.growth import Frontier, GrowthPlan
from dyntree_plugin.tree.token_tree import TokenTree

VOCAB = 7

NOWHERE: Path = (-1,)
"""Path of a frontier's column that has nothing to expand."""


def generator(seed: int, path: Path) -> torch.Generator:
    code = seed
    for token in path:
        code = (code * 31 + token + 1) % 1_000_003
    return torch.Generator().manual_seed(code)


@cache
def log_probs_after(seed: int, path: Path) -> torch.Tensor:
    """Return log D(· | path). Some distributions are sharp, and some lack tokens."""
    logits = torch.randn(VOCAB, generator=generator(seed, path), dtype=torch.float64)
    kind = (seed + len(path)) % 4
    if kind == 1:
        logits[logits < logits.max() - 1.5] = float("-inf")
    return (logits * (5 if kind == 2 else 1.5)).log_softmax(0)


@cache
def noise_after(seed: int, path: Path, count: int) -> torch.Tensor:
    uniform = torch.rand(count, VOCAB, generator=generator(seed + 1, path), dtype=torch.float64)
    return -uniform.log().neg().log()


def draft_of(seed: int) -> Draft:
    return lambda path: log_probs_after(seed, path).exp().tolist()


def draw_of(seed: int, replacement_draws: int = 0) -> Draw:
    """Return a function that draws with the driver's noise.

    With replacement, it makes ``replacement_draws`` draws per node in turn.
    """
    made: dict[Path, int] = {}

    def draw(path: Path, residual: Sequence[float]) -> int:
        noise = noise_after(seed, path, max(1, replacement_draws))
        turn = made.get(path, 0)
        made[path] = turn + 1
        row = noise[turn if replacement_draws else 0]
        return int((torch.tensor(residual, dtype=torch.float64).log() + row).argmax())

    return draw


@contextmanager
def double_precision() -> Iterator[None]:
    """Let values be float64, as those of the references, so that rounding changes no ranking."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(default)


def grow(
    plan: GrowthPlan,
    seeds: list[int],
    room: list[int] | None = None,
    distributions: bool = False,
) -> TokenTree:
    """Grow one tree per seed, in `double_precision`."""
    with double_precision():
        columns = torch.tensor([plan.scratch_slots] * len(seeds) if room is None else room)
        growth = plan.start(len(seeds), columns)
        grown: list[list[Path]] = [[] for _ in seeds]
        paths: list[list[Path]] = [[()] for _ in seeds]
        for width in plan.widths:
            growth.add(*_children(plan, seeds, paths, distributions))
            frontier = growth.frontier()
            assert frontier.tokens.shape == (len(seeds), width)
            paths = [paths_at(frontier, row, grown[row]) for row in range(len(seeds))]
        growth.add(*_children(plan, seeds, paths, distributions))
        return growth.finish()


def paths_of(tree: TokenTree, row: int) -> list[Path]:
    paths: list[Path] = []
    for node in range(int(tree.counts[row])):
        parent = int(tree.parents[row, node])
        above = paths[parent] if parent >= 0 else ()
        paths.append((*above, int(tree.tokens[row, node])))
    return paths


def assert_tree(tree: TokenTree, row: int, expected: Sequence[Slot]) -> None:
    """Assert that a row has the nodes of ``expected`` that have a chance, and their values."""
    expected = [node for node in expected if node.value > 0]
    assert paths_of(tree, row) == [node.path for node in expected]
    values = torch.tensor([node.value for node in expected], dtype=torch.float64)
    torch.testing.assert_close(tree.values[row, : len(expected)].exp(), values)


def drawn_below(tree: TokenTree, row: int, seed: int) -> Iterator[tuple[Path, list[int]]]:
    """Yield the path of the root and of each node, and the nodes that draws below it gave in turn.

    All draws are known to be from the draft of ``seed``.
    """
    draws = tree.draws
    assert draws is not None
    for j, path in enumerate([(), *paths_of(tree, row)]):
        nodes = draws.nodes[row, j].tolist()
        count = sum(node >= 0 for node in nodes)
        assert all(node >= 0 for node in nodes[:count])
        if count:
            law = draws.log_probs[row, int(draws.columns[row, j])]
            torch.testing.assert_close(law, log_probs_after(seed, path))
        yield path, nodes[:count]


def paths_at(frontier: Frontier, row: int, columns: list[Path]) -> list[Path]:
    """Return a frontier's paths as attention sees them, and append them to the request's
    ``columns``.

    A path consists of the ancestors' columns and the node's own. A node's ancestor may stand before
    it in the same frontier.
    """
    words = frontier.ancestors.shape[2]
    known = len(columns)
    for w in range(frontier.tokens.shape[1]):
        seen = unpack_bits(frontier.ancestors[row, w], 32 * words).tolist()
        above = [path for path, bit in zip(columns, seen, strict=False) if bit]
        path = (*max(above, key=len, default=()), int(frontier.tokens[row, w]))
        if bool(frontier.valid[row, w]):
            assert sum(seen) == len(path) == int(frontier.depths[row, w])
            assert seen[known + w]
        columns.append(path if bool(frontier.valid[row, w]) else NOWHERE)
    return columns[known:]


def _children(
    plan: GrowthPlan, seeds: list[int], paths: list[list[Path]], distributions: bool
) -> tuple[torch.Tensor, ...]:
    places = [(seed, path) for seed, row in zip(seeds, paths, strict=True) for path in row]
    log_probs = torch.stack([log_probs_after(seed, path) for seed, path in places])
    shape = (len(seeds), len(paths[0]), -1)
    if plan.sampling == "best":
        found = top_children(log_probs, plan.children)
    else:
        each = plan.children if plan.sampling == "with_replacement" else 1
        noise = torch.stack([noise_after(seed, path, each) for seed, path in places])
        if plan.sampling == "with_replacement":
            found = drawn_children(log_probs, plan.children, noise)
        else:
            found = sampled_children(log_probs, plan.children, noise[:, 0])
    made = tuple(x.reshape(shape) for x in found)
    return (*made, log_probs.view(shape)) if distributions else made

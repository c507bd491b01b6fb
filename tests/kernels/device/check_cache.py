"""Check Triton's kernels for the KV cache, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from paged_cases import DEVICE, LAYOUTS, paged_layers

from dyntree_kernels.cuda.kv_move import KVMover

SRC = [[33, 35, 36, 64, 100], [150, 153, -1, -1, -1], [-1, -1, -1, -1, -1]]
DST = [[33, 34, 35, 36, 96], [111, 112, 7, 7, 7], [9, 9, 9, 9, 9]]


def random_bytes(layout: str, layers: int, content: int) -> torch.Tensor:
    caches = paged_layers(layout, layers, 12, 3, 16, content)
    caches.copy_(torch.randint(0, 256, caches.shape, dtype=torch.uint8))
    return caches


def flat(moves: list[list[int]]) -> list[int]:
    return [slot for request in moves for slot in request]


def moves(src: list[list[int]], dst: list[list[int]]) -> tuple[torch.Tensor, ...]:
    """Return paths, roots and slots that move cache rows from ``src`` to ``dst``; -1 moves nothing.

    After its root, a request has the rows of its destinations, then those of its sources.
    """
    depth = len(src[0])
    path = [[depth + k if at >= 0 else -1 for k, at in enumerate(row)] for row in src]
    roots = [1 + r * (1 + 2 * depth) for r in range(len(src))]
    slots = [5, *(slot for s, d in zip(src, dst, strict=True) for slot in (6, *d, *s))]
    return tuple(torch.tensor(each, device=DEVICE) for each in (path, roots, slots))


def rows(caches: torch.Tensor) -> torch.Tensor:
    """Return a copy of the rows [layers, slots, heads, content] in slot order."""
    return caches.transpose(2, 3).flatten(1, 2).clone()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "head_size"), [(torch.bfloat16, 64), (torch.float32, 20)])
def test_rows_move_bit_exactly_and_nothing_else_changes(
    layout: str, dtype: torch.dtype, head_size: int
) -> None:
    caches = random_bytes(layout, 3, 2 * head_size * dtype.itemsize)
    expected = rows(caches)
    for src, dst in zip(flat(SRC), flat(DST), strict=True):
        if src >= 0:
            expected[:, dst] = expected[:, src]
    assert not torch.equal(rows(caches), expected)
    mover = KVMover(list(caches.view(dtype)))
    mover(*moves(SRC, DST))
    assert torch.equal(rows(caches), expected)


def test_more_rows_than_are_in_flight_at_once_move_in_order() -> None:
    caches = random_bytes("LBNHC", 2, 64)
    expected = rows(caches)
    src = torch.arange(40)[None] * 3 + 12
    dst = torch.arange(40)[None] + 11
    expected[:, dst[0]] = expected[:, src[0]]
    path, *others = moves(src.tolist(), dst.tolist())
    wide = torch.nn.functional.pad(path, (1, 5))
    KVMover(list(caches))(wide[:, 1:41], *others)
    assert torch.equal(rows(caches), expected)


def test_accepted_nodes_come_behind_their_roots() -> None:
    caches = random_bytes("LBHNC", 2, 64)
    before = rows(caches)
    path = torch.tensor([[0, 3, 4, -1], [-1] * 4, [1, 2, -1, -1], [0, 1, 2, 3]])
    roots = torch.tensor([0, 8, 9, 14])
    slots = torch.randperm(before.shape[1], generator=torch.Generator().manual_seed(0))[:19]
    expected = before.clone()
    for root, row in zip(roots.tolist(), path.tolist(), strict=True):
        for step, node in enumerate(row):
            if node >= 0:
                expected[:, slots[root + 1 + step]] = before[:, slots[root + 1 + node]]
    KVMover(list(caches))(*(each.to(DEVICE) for each in (path, roots, slots)))
    changed = (rows(caches) != before).flatten(2).any(2).any(0)
    assert sorted(changed.nonzero()[:, 0].tolist()) == sorted(slots[[2, 3, 10, 11]].tolist())
    assert torch.equal(rows(caches), expected)


def test_no_row_moves_from_or_to_the_null_slot() -> None:
    caches = random_bytes("LBNHC", 2, 64)
    before = rows(caches)
    expected = before.clone()
    expected[1, 20] = before[1, 40]
    KVMover([caches[1]])(*moves([[-1, 50, 40]], [[30, -1, 20]]))
    path, roots, slots = moves([[60, 50, 40]], [[30, -1, 21]])
    slots[slots == 60] = -1
    expected[1, 21] = before[1, 40]
    KVMover([caches[1]])(path, roots, slots)
    assert torch.equal(rows(caches), expected)


def test_rows_of_odd_bytes_and_layers_of_two_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="32-bit words"):
        KVMover(list(random_bytes("LBNHC", 2, 62)))
    a, b = random_bytes("LBNHC", 2, 64)
    with pytest.raises(ValueError, match="one shape and strides"):
        KVMover([a, b[:, :2]])
    path, roots, slots = moves(SRC, DST)
    with pytest.raises(ValueError, match="dense"):
        KVMover([a, b])(path, roots, slots[::2])

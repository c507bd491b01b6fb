"""Compaction of accepted rows, bit by bit, in every layout."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from attention_inputs import tree_mask
from packed_cases import make_case, write
from tree_shapes import chain, random_tree

from dyntree_kernels.cpu.kv_move import KVMover, kv_move
from dyntree_kernels.cpu.layout import unpack

LAYOUTS = [
    ("vec", torch.float32, 32),
    ("vec", torch.bfloat16, 64),
    ("vec16", torch.float16, 80),
    ("amx", torch.bfloat16, 64),
    ("vec", torch.float8_e4m3fn, 64),
    ("amx", torch.float8_e4m3fn, 32),
]

BITS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}


def random_layers(
    layers: int, head_size: int, dtype: torch.dtype
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return caches of arbitrary bits, including NaN."""
    bits = BITS[dtype.itemsize]
    info = torch.iinfo(bits)
    shape = (layers, 12, 3, 64, head_size)
    caches = torch.randint(info.min, info.max, shape, dtype=bits).view(dtype)
    halves = [layer.chunk(2, dim=2) for layer in caches]
    return [key for key, _ in halves], [value for _, value in halves]


def snapshot(keys: list[torch.Tensor], values: list[torch.Tensor], isa: str) -> torch.Tensor:
    """Return the raw bits [2 * layers, slots, Hkv, D]."""
    rows = [rows for k, v in zip(keys, values, strict=True) for rows in unpack(k, v, isa)]
    stacked = torch.stack(rows)
    return stacked.view(BITS[stacked.element_size()])


@pytest.mark.parametrize(("isa", "dtype", "head_size"), LAYOUTS)
@pytest.mark.parametrize("layers", [1, 5])
def test_rows_move_bit_exactly_and_nothing_else_changes(
    isa: str, dtype: torch.dtype, head_size: int, layers: int
) -> None:
    keys, values = random_layers(layers, head_size, dtype)
    before = snapshot(keys, values, isa)
    src = torch.tensor([[33, 35, 36, 64, 100], [200, 203, -1, -1, -1], [-1, -1, -1, -1, -1]])
    dst = torch.tensor([[33, 34, 35, 36, 96], [31, 32, 7, 7, 7], [9, 9, 9, 9, 9]])
    kv_move(keys, values, isa, src, dst)
    expected = before.clone()
    for s, d in zip(src.flatten().tolist(), dst.flatten().tolist(), strict=True):
        if s >= 0:
            expected[:, d] = expected[:, s]
    assert not torch.equal(before, expected)
    assert torch.equal(snapshot(keys, values, isa), expected)


def test_no_row_moves_to_the_null_slot() -> None:
    keys, values = random_layers(2, 32, torch.float32)
    expected = snapshot(keys, values, "vec")
    # The slot before a layer's first is the last one of the layer before.
    kv_move(keys[1:], values[1:], "vec", torch.tensor([[50, 40]]), torch.tensor([[-1, 20]]))
    expected[2:, 20] = expected[2:, 40]
    assert torch.equal(snapshot(keys, values, "vec"), expected)


def test_a_mover_can_be_used_again() -> None:
    keys, values = random_layers(3, 32, torch.float32)
    expected = snapshot(keys, values, "vec")
    mover = KVMover(keys, values, "vec")
    for s, d in ((40, 3), (3, 2), (90, 40)):
        mover(torch.tensor([[s]]), torch.tensor([[d]]))
        expected[:, d] = expected[:, s]
    assert torch.equal(snapshot(keys, values, "vec"), expected)


@pytest.mark.parametrize(("isa", "dtype", "head_size"), [LAYOUTS[at] for at in (0, 3, 5)])
def test_decoding_after_a_move_equals_decoding_from_a_fresh_cache(
    isa: str, dtype: torch.dtype, head_size: int
) -> None:
    ctx, tree = 50, random_tree(40, torch.Generator().manual_seed(4))
    path = [39]
    while tree[path[0]] >= 0:
        path.insert(0, tree[path[0]])
    accepted, length = torch.tensor(path), ctx + len(path)
    assert path != list(range(len(path)))
    options: dict[str, Any] = {"isa": isa, "dtype": dtype, "head_size": head_size}
    if dtype.itemsize == 1:
        options |= {"dtype": torch.bfloat16, "kv_dtype": dtype}
    # Both decode the same new token. In ``fresh``, the context is the accepted path in chain order.
    fresh = make_case([tree_mask(chain(1))], [length], **options)
    moved = make_case([tree_mask(tree)], [ctx], **options)
    kept = torch.cat([torch.arange(ctx), ctx + accepted])
    write(
        fresh.key_cache, fresh.value_cache, isa, fresh.slots(torch.arange(length)),
        moved.keys[0][kept], moved.values[0][kept],
    )  # fmt: skip
    kv_move(
        [moved.key_cache], [moved.value_cache], isa, moved.slots(ctx + accepted)[None],
        moved.slots(torch.arange(ctx, length))[None],
    )  # fmt: skip
    write(
        moved.key_cache, moved.value_cache, isa, moved.slots(torch.tensor([length])),
        fresh.keys[0][-1:], fresh.values[0][-1:],
    )  # fmt: skip
    decode = dataclasses.replace(
        moved, q=fresh.q, bits=fresh.bits, qo_indptr=fresh.qo_indptr, ctx_lens=fresh.ctx_lens
    )
    assert torch.equal(decode.run(), fresh.run())


def test_layers_of_different_shapes_are_refused() -> None:
    keys, values = random_layers(2, 32, torch.float32)
    with pytest.raises(ValueError, match="one shape and strides"):
        kv_move([keys[0], keys[1][:, :2]], values, "vec", torch.zeros(1, 1), torch.zeros(1, 1))

"""Attention in Triton copies tiles while it multiplies others, and adds up its splits at once."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="these kernels are written in Triton")

from ahead_of_time import (  # noqa: E402
    HAS_TOOLS,
    NO_TOOLS,
    PLAIN,
    POINTERS,
    UNQUANTISED,
    WHOLE,
    compile_for,
    compiled,
    loops,
)

from dyntree_kernels.cuda import attention, latent_attention, path_attention, splits  # noqa: E402

pytestmark = pytest.mark.skipif(not HAS_TOOLS, reason=NO_TOOLS)
CAPABILITIES = pytest.mark.parametrize(
    "capability", [90, pytest.param(100, marks=pytest.mark.slow)]
)

LATENT: dict[str, Any] = {
    "G": 4, "V": 512, "R": 64, "PAGE": 64, "BLOCKS": 512, "BM": 16, "BN": 32, "NODES": 8,
    "WORDS": 2, "SPLITS": 4, **UNQUANTISED,
}  # fmt: skip


def copies_in_flight(result: object) -> list[int]:
    """Return the groups of copies that each wait leaves in flight, in the loop that copies."""
    copying = [loop for loop in loops(result) if any("LDGSTS" in text for text in loop)]
    assert copying, "no loop copies to shared memory"
    # The innermost: for sm_100 code behind the kernel's end jumps back into the loop as well.
    text = "\n".join(min(copying, key=len))
    waits = re.findall(r"(?<!WARPGROUP\.)DEPBAR\.LE SB0, (0x\w+)", text)
    return [int(each, 16) for each in waits]


@CAPABILITIES
@pytest.mark.parametrize(
    ("rows", "head_size", "of_cache"),
    [
        *((16, 128, "*bf16"), (64, 128, "*bf16"), (64, 128, "*fp8e4nv")),
        *((rows, 256, "*bf16") for rows in (32, 64)),
    ],
)
def test_a_tile_is_in_flight_while_another_is_multiplied(
    rows: int, head_size: int, of_cache: str, capability: int
) -> None:
    tile = attention.tiling(head_size, rows, 2 if of_cache == "*bf16" else 1)
    result = compile_for(
        attention._tree_attention, tile.warps, tile.stages, POINTERS | {"KV": of_cache},
        capability, H=8, G=4, D=head_size, DP=head_size, V=head_size, VP=head_size, PAGE=16,
        BLOCKS=512, BM=tile.block_m, BN=tile.block_n, NODES=tile.block_m // 4, WORDS=2, SPLITS=16,
        **WHOLE, **UNQUANTISED,
    )  # fmt: skip
    waits = copies_in_flight(result)
    assert waits, "the loop never waits for its copies"
    assert min(waits) >= 1
    assert result.metadata.shared <= (tile.shared or 227 << 10)


@CAPABILITIES
@pytest.mark.parametrize(
    ("head_size", "of_cache"), [(128, "*bf16"), (128, "*fp8e4nv"), (256, "*bf16")]
)
def test_tiles_of_context_are_in_flight_in_the_order_of_positions(
    head_size: int, of_cache: str, capability: int
) -> None:
    tile = path_attention.path_tiling(head_size, 2 if of_cache == "*bf16" else 1)
    result = compile_for(
        path_attention._path_attention, tile.warps, tile.stages, POINTERS | {"KV": of_cache},
        capability, path_attention.ARITHMETIC, G=4, D=head_size, DP=head_size, PAGE=16, BLOCKS=512,
        BM=tile.block_m, BN=tile.block_n, BOTH_WAYS=False, **PLAIN, **UNQUANTISED,
    )  # fmt: skip
    assert min(copies_in_flight(result)) >= 1


@pytest.mark.parametrize(("rows", "head_size"), [(64, 128), (400, 128), (32, 256)])
def test_tiles_of_every_device_fit_where_shared_memory_is_least(rows: int, head_size: int) -> None:
    tile = attention.tiling(head_size, rows, 2)
    assert not tile.shared
    result = compile_for(
        attention._tree_attention, tile.warps, tile.stages, capability=86, H=8, G=4, D=head_size,
        DP=head_size, V=head_size, VP=head_size, PAGE=16, BLOCKS=512, BM=tile.block_m,
        BN=tile.block_n, NODES=tile.block_m // 4, WORDS=2, SPLITS=16, **WHOLE, **UNQUANTISED,
    )  # fmt: skip
    assert result.metadata.shared <= 99 << 10


@CAPABILITIES
@pytest.mark.parametrize("rows", [16, 32])
def test_latent_vectors_are_in_flight_as_well(rows: int, capability: int) -> None:
    tile = latent_attention.latent_tiling(rows, 2)
    result = compile_for(
        latent_attention._latent_attention, tile.warps, tile.stages, capability=capability,
        **LATENT | {"BM": tile.block_m},
    )  # fmt: skip
    assert min(copies_in_flight(result)) >= 1
    assert result.metadata.shared <= (tile.shared or 99 << 10)


def test_a_device_with_less_shared_memory_has_fewer_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    tile, device = attention.tiling(256, 64, 2), torch.device("cpu")
    assert tile.stages_on(device) == 3
    monkeypatch.setattr(attention, "_shared_memory", lambda device: 99 << 10)
    assert tile.stages_on(device) == 2
    assert attention.tiling(128, 64, 2).stages_on(device) == 3


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize(
    ("of_splits", "head_size", "heads"),
    [(2, 64, 8), (16, 128, 8), (32, 128, 1), (32, 512, 1)],
)
def test_splits_are_added_up_without_a_loop(
    of_splits: int, head_size: int, heads: int, capability: int
) -> None:
    given = {"H": heads, "G": 4, "D": head_size, "DP": head_size, "SPLITS": of_splits,
             "LOADED": of_splits, "capability": capability}  # fmt: skip
    warps = splits.reducing_warps(of_splits * head_size)
    assert loops(compile_for(splits._reduce_splits, warps, **given)) == []
    used = compiled(splits._reduce_splits, warps, **given)
    assert used["stack"] == 0, used


def test_a_loop_without_copies_in_flight_is_seen() -> None:
    """With two stages a tile's copies begin when the tile before has been multiplied."""
    waits = copies_in_flight(compile_for(latent_attention._latent_attention, 8, 2, **LATENT))
    assert {*waits} == {0}

"""Attention in Triton, compiled ahead of time: no registers are spilled, tiles are copied while
others are multiplied, and splits are added up at once."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest
import torch

triton = pytest.importorskip("triton", reason="these kernels are written in Triton")

from ahead_of_time import (  # noqa: E402
    CAPABILITIES,
    HAS_TOOLS,
    NO_TOOLS,
    PLAIN,
    POINTERS,
    UNQUANTISED,
    WHOLE,
    compile_for,
    loops,
    used_by,
)

from dyntree_kernels.cuda import (  # noqa: E402
    attention,
    cascade,
    latent_attention,
    path_attention,
    splits,
)

pytestmark = pytest.mark.skipif(not HAS_TOOLS, reason=NO_TOOLS)

MOST_SHARED, LEAST_SHARED = 227 << 10, 99 << 10
"""Bytes of shared memory of the largest devices, and of capability 8.6."""
FLOAT8 = "*fp8e4nv"
SIZES = {FLOAT8: 1, "*bf16": 2, "*fp32": 4}
OF_PATHS: dict[str, Any] = {
    "G": 4, "R": 0, "PAGE": 16, "BLOCKS": 512, "BOTH_WAYS": False, **PLAIN, **UNQUANTISED,
}  # fmt: skip
"""Attention in the order of positions."""


class Trees(NamedTuple):
    """Tree attention over ``rows`` of a request, whose queries and cache have these types.

    ``spilled``: bytes of its stack. The first tile needs two registers more than there are, to
    treat values that are not finite.
    """

    head_size: int
    rows: int
    group: int = 4
    splits: int = 2
    words: int = 2
    features: dict[str, Any] = WHOLE
    queries: str = "*bf16"
    cache: str = "*bf16"
    spilled: int = 0

    def compiled(self, tile: Any, capability: int = 90, **more: Any) -> Any:
        nodes = triton.next_power_of_2(attention.nodes_per_tile(tile.block_m, self.group))
        padded = triton.next_power_of_2(self.head_size)
        quantised = [each == FLOAT8 for each in (self.queries, self.cache, self.cache)]
        absent = [name for name, there in zip(UNQUANTISED, quantised, strict=True) if not there]
        sizes = {"D": self.head_size, "DP": padded, "V": self.head_size, "VP": padded}
        return compile_for(
            attention._tree_attention, tile.warps, tile.stages,
            POINTERS | {"Q": self.queries, "KV": self.cache}, capability, H=8, G=self.group,
            PAGE=16, BLOCKS=512, BM=tile.block_m, BN=tile.block_n, NODES=nodes, WORDS=self.words,
            SPLITS=self.splits, **{**sizes, **dict.fromkeys(absent), **self.features, **more},
        )  # fmt: skip


WINDOW = {"WINDOW": 128, "CAP": 0.0, "LSE": None}
TREES = [
    Trees(128, 16, splits=1, words=8),
    Trees(128, 64, group=8, splits=4, words=32),
    Trees(128, 128, splits=4, spilled=8),
    Trees(64, 128, group=8, features=WINDOW),
    Trees(256, 32, group=8, features=WINDOW),
    Trees(512, 64, group=8, features={"WINDOW": 4096, "CAP": 72.1, "SINKS": None, "LSE": None}),
    *(Trees(192, rows, group=8, features={**WINDOW, "V": 128, "VP": 128}) for rows in (32, 272)),
    Trees(128, 16, cache=FLOAT8, spilled=8),
    Trees(128, 128, queries=FLOAT8, cache=FLOAT8),
]
COPYING = [
    *(Trees(128, rows, splits=16) for rows in (16, 64)),
    Trees(128, 64, splits=16, cache=FLOAT8),
    *(Trees(256, rows, splits=16) for rows in (32, 64)),
]


def copies_in_flight(result: object) -> list[int]:
    """Return the groups of copies that each wait leaves in flight, in the loop that copies."""
    copying = [loop for loop in loops(result) if any("LDGSTS" in text for text in loop)]
    assert copying, "no loop copies to shared memory"
    # The innermost: for sm_100 code behind the kernel's end jumps back into the loop as well.
    text = "\n".join(min(copying, key=len))
    waits = re.findall(r"(?<!WARPGROUP\.)DEPBAR\.LE SB0, (0x\w+)", text)
    assert waits, "the loop never waits for its copies"
    return [int(each, 16) for each in waits]


@pytest.mark.parametrize("case", TREES, ids=str)
def test_attention_of_every_size_and_feature_does_not_spill(case: Trees) -> None:
    tile = attention.tiling(case.head_size, case.rows, SIZES[case.cache])
    used = used_by(case.compiled(tile))
    assert used["stack"] <= case.spilled, used
    assert used["shared"] <= MOST_SHARED, used


@CAPABILITIES
@pytest.mark.parametrize("case", COPYING, ids=str)
def test_a_tile_is_in_flight_while_another_is_multiplied(case: Trees, capability: int) -> None:
    tile = attention.tiling(case.head_size, case.rows, SIZES[case.cache])
    result = case.compiled(tile, capability)
    assert min(copies_in_flight(result)) >= 1
    assert result.metadata.shared <= (tile.shared or MOST_SHARED)


@CAPABILITIES
@pytest.mark.parametrize(
    ("head_size", "rows"),
    [(64, 16), (64, 32), (64, 64), *((128, rows) for rows in (16, 32, 64, 512)), (256, 32),
     (256, 64)],
)  # fmt: skip
def test_a_tree_after_its_context_does_not_spill(
    head_size: int, rows: int, capability: int
) -> None:
    case = Trees(head_size, rows, splits=1, features=PLAIN)
    used = used_by(case.compiled(cascade.tree_tiling(head_size, rows), capability, sl_t=1))
    assert used["stack"] == 0, used
    assert used["shared"] <= MOST_SHARED, used


@pytest.mark.parametrize(("rows", "head_size"), [(64, 128), (400, 128), (32, 256)])
def test_tiles_of_every_device_fit_where_shared_memory_is_least(rows: int, head_size: int) -> None:
    tile = attention.tiling(head_size, rows, 2)
    assert not tile.shared
    result = Trees(head_size, rows, splits=16).compiled(tile, 86)
    assert result.metadata.shared <= LEAST_SHARED


def test_a_tile_that_is_too_large_is_seen_to_spill() -> None:
    tile = attention.Tiling(128, 64, 4, 3)
    used = used_by(Trees(128, 128, splits=4).compiled(tile))
    assert used["stack"] > max(case.spilled for case in TREES), used


@CAPABILITIES
@pytest.mark.parametrize(
    ("head_size", "of_cache", "features"),
    [
        (64, "*bf16", {}),
        (128, FLOAT8, {}),
        (128, "*bf16", {"WINDOW": 128, "CAP": 72.1}),
        (256, "*bf16", {"WINDOW": 4096}),
        (512, "*bf16", {"WINDOW": 4096, "CAP": 72.1}),
        (128, "*fp32", {}),
    ],
)
def test_attention_in_the_order_of_positions_copies_ahead_and_does_not_spill(
    head_size: int, of_cache: str, features: dict[str, Any], capability: int
) -> None:
    size = SIZES[of_cache]
    types = {"KV": of_cache} | (dict.fromkeys(("Q", "OUT"), of_cache) if size == 4 else {})
    tile = path_attention.path_tiling(head_size, size)
    result = compile_for(
        path_attention._path_attention, tile.warps, tile.stages, POINTERS | types, capability,
        path_attention.ARITHMETIC, BM=tile.block_m, BN=tile.block_n, D=head_size, DP=head_size,
        **OF_PATHS | features,
    )  # fmt: skip
    used = used_by(result)
    assert used["stack"] == 0, used
    assert used["shared"] <= LEAST_SHARED, used
    if head_size in (128, 256) and size < 4:
        assert min(copies_in_flight(result)) >= 1


@CAPABILITIES
def test_latent_attention_in_the_order_of_positions_does_not_spill(capability: int) -> None:
    tile = latent_attention.latent_tiling(1, 2)
    result = compile_for(
        path_attention._path_attention, tile.warps, tile.stages, POINTERS, capability,
        path_attention.ARITHMETIC, BM=tile.block_m, BN=tile.block_n, D=512, DP=512,
        **OF_PATHS | {"R": 64, "G": 16, "PAGE": 64},
    )  # fmt: skip
    used = used_by(result)
    assert used["stack"] == 0, used
    assert used["shared"] <= MOST_SHARED, used
    assert not any("FFMA" in text for loop in loops(result) for text in loop)


@CAPABILITIES
def test_masked_tiles_round_as_the_others(capability: int) -> None:
    """Their products have one layout, and no multiplication is fused with an addition. Control:
    usual arithmetic, in which some are."""
    tile = path_attention.path_tiling(128, 2)
    strict, usual = (
        compile_for(
            path_attention._path_attention, tile.warps, tile.stages, POINTERS, capability, options,
            BM=tile.block_m, BN=tile.block_n, D=128, DP=128, **OF_PATHS | {"WINDOW": 128},
        )
        for options in (path_attention.ARITHMETIC, {})
    )  # fmt: skip
    products = re.findall(r"tt\.dot .* : (.*?) loc", strict.asm["ttgir"])
    assert len(products) == 6
    assert products[2:] == products[:2] * 2
    fused = [
        sum("FFMA" in text for loop in loops(each) for text in loop) for each in (strict, usual)
    ]
    assert fused[0] == 0 < fused[1]


def latent(
    stages: int, tile: Any, capability: int = 90, of_queries: str = "*bf16",
    of_cache: str = "*bf16", **sizes: int,
) -> Any:  # fmt: skip
    quantised = [each == FLOAT8 for each in (of_queries, of_cache, of_cache)]
    absent = [name for name, there in zip(UNQUANTISED, quantised, strict=True) if not there]
    return compile_for(
        latent_attention._latent_attention, tile.warps, stages,
        POINTERS | {"Q": of_queries, "CACHE": of_cache}, capability, V=512, R=64, PAGE=64,
        BLOCKS=512, BM=tile.block_m, BN=tile.block_n, WORDS=2, **sizes, **dict.fromkeys(absent),
    )  # fmt: skip


@CAPABILITIES
@pytest.mark.parametrize(
    ("rows", "heads", "splits", "of_queries", "of_cache"),
    [
        *((*shape, "*bf16", "*bf16") for shape in ((16, 128, 1), (17, 16, 4), (17, 128, 4))),
        (17, 128, 4, "*bf16", FLOAT8),
        *((17, heads, 4, FLOAT8, FLOAT8) for heads in (16, 128)),
    ],
)
def test_latent_attention_of_deepseeks_size_copies_ahead_and_does_not_spill(
    rows: int, heads: int, splits: int, of_queries: str, of_cache: str, capability: int
) -> None:
    tile = latent_attention.latent_tiling(rows, SIZES[of_cache])
    nodes = triton.next_power_of_2(attention.nodes_per_tile(tile.block_m, heads))
    result = latent(
        tile.stages, tile, capability, of_queries, of_cache, G=heads, NODES=nodes, SPLITS=splits
    )
    used = used_by(result)
    assert used["stack"] == 0, used
    assert used["shared"] <= (MOST_SHARED if of_cache == "*bf16" else LEAST_SHARED), used
    if of_cache == "*bf16":
        assert min(copies_in_flight(result)) >= 1
        assert used["shared"] <= (tile.shared or LEAST_SHARED)


def test_a_loop_without_copies_in_flight_is_seen() -> None:
    """With two stages a tile's copies begin when the tile before has been multiplied."""
    tile = attention.Tiling(16, 32, 8, 2)
    assert {*copies_in_flight(latent(2, tile, G=4, NODES=8, SPLITS=4))} == {0}


def test_a_device_with_less_shared_memory_has_fewer_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    tile, device = attention.tiling(256, 64, 2), torch.device("cpu")
    assert tile.stages_on(device) == 3
    monkeypatch.setattr(attention, "_shared_memory", lambda device: LEAST_SHARED)
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
    warps = splits.reducing_warps(of_splits * head_size)
    result = compile_for(
        splits._reduce_splits, warps, capability=capability, H=heads, G=4, D=head_size,
        DP=head_size, SPLITS=of_splits, LOADED=of_splits,
    )  # fmt: skip
    assert loops(result) == []
    assert used_by(result)["stack"] == 0

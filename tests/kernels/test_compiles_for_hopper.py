"""Every Triton kernel compiles for sm_90 ahead of time, and attention does not spill registers."""

from __future__ import annotations

import re
from typing import Any

import pytest

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

from dyntree_kernels.cuda import (  # noqa: E402
    attention,
    cascade,
    children,
    draft_rows,
    drawn,
    grafts,
    growth,
    gumbel,
    kv_move,
    latent_attention,
    learn,
    look_up,
    path_attention,
    paths,
    place,
    recurrence,
    selection,
    state_commits,
    stored,
    traversal,
    walk,
)
from dyntree_kernels.features import MOST_RECURRENT_ROWS  # noqa: E402

pytestmark = pytest.mark.skipif(not HAS_TOOLS, reason=NO_TOOLS)

SPILLED = {(128, 4, 4): 8, (16, 4, "*bf16"): 8}
"""Bytes of attention's stack, by rows, group, and splits or queries beside a quantised cache. The
first tile needs two registers more than there are, to treat values that are not finite."""
OF_PATHS: dict[str, Any] = {
    "G": 4, "PAGE": 16, "BLOCKS": 512, "BOTH_WAYS": False, **PLAIN, **UNQUANTISED,
}  # fmt: skip
"""Attention in the order of positions."""
OF_TRIES = {
    growth._expand: ("ABOVE", "GRAFT_DEPTHS", "EXPANSIONS"),
    growth._order: (),
    stored.store: ("ABOVE", "GRAFT_DEPTHS", "KINDS", "STORED_KINDS"),
    children._merge: (
        *("ABOVE", "GRAFT_DEPTHS", "EXPANSIONS", "EDGES", "EVIDENCE", "KINDS", "LOGITS"),
        *("TEMPERATURES", "SEEDS", "POSITIONS", "vocab", "s_logits"),
    ),
}
"""Arguments that growth leaves out without tries."""
OF_DRAFT = {"SIZE": 64, "RANKS": 64, "BLOCKS": 64}
"""Of a draft's distribution, and of the logits of a vocabulary of 128 Ki."""
SM100 = {"capability": 100}
SIZES = ((1024, {}), (64, SM100))
SHIFTS = (0, -1)
"""Positions of a draft's rows, less those of their tokens."""


CAPABILITIES = pytest.mark.parametrize(
    "capability", [90, pytest.param(100, marks=pytest.mark.slow)]
)


def of_growth(kernel: Any, warps: int, nodes: int, **constants: Any) -> dict[str, int]:
    """Do as `compiled` for tries of so many nodes; without tries if there are none."""
    left_out = () if nodes else OF_TRIES[kernel]
    return compiled(kernel, warps, GRAFTS=nodes, **dict.fromkeys(left_out), **constants)


@pytest.mark.parametrize(
    ("rows", "group", "splits", "words"), [(16, 4, 1, 8), (64, 8, 4, 32), (128, 4, 4, 2)]
)
def test_attention_at_head_size_128_does_not_spill(
    rows: int, group: int, splits: int, words: int
) -> None:
    tile = attention.tiling(128, rows, 2)
    nodes = triton.next_power_of_2(attention.nodes_per_tile(tile.block_m, group))
    used = compiled(
        attention._tree_attention, tile.warps, tile.stages, H=8, G=group, D=128, DP=128, V=128,
        VP=128, PAGE=16, BLOCKS=512, BM=tile.block_m, BN=tile.block_n, NODES=nodes, WORDS=words,
        SPLITS=splits,
        **WHOLE, **UNQUANTISED,
    )  # fmt: skip
    assert used["stack"] <= SPILLED.get((rows, group, splits), 0), used
    assert used["shared"] <= 227 * 1024, used


@pytest.mark.parametrize(
    ("head_size", "rows", "features"),
    [
        (64, 128, {"WINDOW": 128}),
        (256, 32, {"WINDOW": 128}),
        (512, 64, {"WINDOW": 4096, "CAP": 72.1, "SINKS": None}),
        *((192, rows, {"V": 128, "VP": 128, "WINDOW": 128}) for rows in (32, 272)),
    ],
)
def test_attention_of_every_head_size_and_feature_fits(
    head_size: int, rows: int, features: dict[str, Any]
) -> None:
    tile, padded = attention.tiling(head_size, rows, 2), triton.next_power_of_2(head_size)
    nodes = triton.next_power_of_2(attention.nodes_per_tile(tile.block_m, 8))
    used = compiled(
        attention._tree_attention, tile.warps, tile.stages, H=8, G=8, D=head_size, DP=padded,
        PAGE=16, BLOCKS=512, BM=tile.block_m, BN=tile.block_n, NODES=nodes, WORDS=2, SPLITS=2,
        **{"V": head_size, "VP": padded, "CAP": 0.0, "LSE": None, **UNQUANTISED, **features},
    )  # fmt: skip
    assert used["stack"] == 0, used
    assert used["shared"] <= 227 * 1024, used


@CAPABILITIES
@pytest.mark.parametrize(
    ("head_size", "rows", "group"),
    [
        *((64, rows, 4) for rows in (16, 32, 64)),
        *((128, rows, 4) for rows in (16, 32, 64, 512)),
        *((256, rows, 4) for rows in (32, 64)),
    ],
)
def test_a_tree_after_its_context_does_not_spill(
    head_size: int, rows: int, group: int, capability: int
) -> None:
    tile = cascade.tree_tiling(head_size, rows)
    nodes = triton.next_power_of_2(attention.nodes_per_tile(tile.block_m, group))
    used = compiled(
        attention._tree_attention, tile.warps, tile.stages, capability=capability, H=8, G=group,
        D=head_size, DP=head_size, V=head_size, VP=head_size, PAGE=16, BLOCKS=512,
        BM=tile.block_m, BN=tile.block_n, NODES=nodes, WORDS=2, SPLITS=1, sl_t=1,
        **PLAIN, **UNQUANTISED,
    )  # fmt: skip
    assert used["stack"] == 0, used
    assert used["shared"] <= 227 * 1024, used


@pytest.mark.parametrize(("rows", "of_queries"), [(16, "*bf16"), (128, "*fp8e4nv")])
def test_attention_over_quantised_caches_fits(rows: int, of_queries: str) -> None:
    tile = attention.tiling(128, rows, 1)
    nodes = triton.next_power_of_2(attention.nodes_per_tile(tile.block_m, 4))
    of_scale = {} if of_queries == "*fp8e4nv" else {"QUERY_SCALE": None}
    used = compiled(
        attention._tree_attention, tile.warps, tile.stages,
        POINTERS | {"Q": of_queries, "KV": "*fp8e4nv"}, H=8, G=4, D=128, DP=128, V=128, VP=128,
        PAGE=16, BLOCKS=512, BM=tile.block_m, BN=tile.block_n, NODES=nodes, WORDS=2, SPLITS=2,
        **WHOLE, **of_scale,
    )  # fmt: skip
    assert used["stack"] <= SPILLED.get((rows, 4, of_queries), 0), used
    assert used["shared"] <= 227 * 1024, used


@CAPABILITIES
@pytest.mark.parametrize(
    ("head_size", "of_cache", "features"),
    [
        (64, "*bf16", {}),
        (128, "*fp8e4nv", {}),
        (128, "*bf16", {"WINDOW": 128, "CAP": 72.1}),
        (256, "*bf16", {"WINDOW": 4096}),
        (512, "*bf16", {"WINDOW": 4096, "CAP": 72.1}),
        (128, "*fp32", {}),
    ],
)
def test_attention_in_the_order_of_positions_does_not_spill(
    head_size: int, of_cache: str, features: dict[str, Any], capability: int
) -> None:
    size = {"*fp8e4nv": 1, "*bf16": 2, "*fp32": 4}[of_cache]
    types = {"KV": of_cache} | (dict.fromkeys(("Q", "OUT"), of_cache) if size == 4 else {})
    tile = path_attention.path_tiling(head_size, size)
    used = compiled(
        path_attention._path_attention, tile.warps, tile.stages, POINTERS | types, capability,
        path_attention.ARITHMETIC, BM=tile.block_m, BN=tile.block_n, D=head_size, DP=head_size,
        **OF_PATHS | features,
    )  # fmt: skip
    assert used["stack"] == 0, used
    assert used["shared"] <= 99 * 1024, used


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


@CAPABILITIES
@pytest.mark.parametrize(
    ("rows", "heads", "splits", "of_queries", "of_cache"),
    [
        *((*shape, "*bf16", "*bf16") for shape in ((16, 128, 1), (17, 16, 4), (17, 128, 4))),
        (17, 128, 4, "*bf16", "*fp8e4nv"),
        *((17, heads, 4, "*fp8e4nv", "*fp8e4nv") for heads in (16, 128)),
    ],
)
def test_latent_attention_of_deepseeks_size_does_not_spill(
    rows: int, heads: int, splits: int, of_queries: str, of_cache: str, capability: int
) -> None:
    tile = latent_attention.latent_tiling(rows, 2 if of_cache == "*bf16" else 1)
    nodes = triton.next_power_of_2(attention.nodes_per_tile(tile.block_m, heads))
    quantised = [each == "*fp8e4nv" for each in (of_queries, of_cache, of_cache)]
    absent = [name for name, there in zip(UNQUANTISED, quantised, strict=True) if not there]
    used = compiled(
        latent_attention._latent_attention, tile.warps, tile.stages,
        POINTERS | {"Q": of_queries, "CACHE": of_cache}, capability, G=heads, V=512, R=64,
        PAGE=64, BLOCKS=512, BM=tile.block_m, BN=tile.block_n, NODES=nodes, WORDS=2,
        SPLITS=splits, **dict.fromkeys(absent),
    )  # fmt: skip
    assert used["stack"] == 0, used
    assert used["shared"] <= (227 if of_cache == "*bf16" else 99) * 1024, used


def test_a_tile_that_is_too_large_is_seen_to_spill() -> None:
    used = compiled(
        attention._tree_attention, 4, 3, H=8, G=4, D=128, DP=128, V=128, VP=128, PAGE=16,
        BLOCKS=512, BM=128, BN=64, NODES=32, WORDS=2, SPLITS=4, **WHOLE, **UNQUANTISED,
    )  # fmt: skip
    assert used["stack"] > max(SPILLED.values()), used


@pytest.mark.parametrize(
    ("kernel", "constants"),
    [
        (kv_move._move, {"PAGE": 16, "ALIGN": 16, "ROWS": kv_move._ROWS, "WORDS": 128}),
        *((kernel, {"ROWS": 64}) for kernel in (place._place, place._place_packed)),
        *((draft_rows._chain, {"ROWS": 64, "SHIFT": shift}) for shift in SHIFTS),
        *((draft_rows._begin, {"COLUMNS": 512, "SHIFT": shift}) for shift in SHIFTS),
        (learn._learn, {"STEPS": 2, "DEPTH": 8, "RB": 64, "NP": 16}),
        (look_up._search, {"LONGEST": 32, "KEPT": 8, "BLOCK": look_up._BLOCK}),
        (look_up._grow, {"PLACES": 8, "DEPTHS": 64, "NODES": 64, "ENTRIES": 512}),
        (paths._climb, {"ROWS": paths._ROWS}),
        (paths._penalize, {"BLOCK": paths._BLOCK}),
        (paths._mask_bad_words, {}),
        (paths._force, {}),
        (paths._force, {"start_len": 1, "end_len": 1, "forced_len": 1}),
        (paths._climb, {"ROWS": paths._ROWS, "depth": 1, "nodes": 1}),
        (gumbel._perturb, {"BLOCK": 1024}),
        (traversal._add_up, {"BLOCK": traversal._BLOCK}),
        (traversal._draw, {"SIZE": 64, "BLOCK": traversal._BLOCK}),
        (traversal._emit, {"BLOCKS": 64}),
        *((traversal._accept, {"NODES": nodes, **OF_DRAFT, **each}) for nodes, each in SIZES),
        *((drawn._draw_children, {"K": 8, "CHILDREN": 8, "KEPT": 64, "ENTRIES": 4096, **OF_DRAFT,
           "LEARNED": nodes > 64, "GRAFTS": 64, **each}) for nodes, each in SIZES),
        (gumbel._rank, {"BLOCK": gumbel._CANDIDATES, "K": 8, "NOISE": True}),
        *((selection._hide, {"COLUMNS": 1024, **each}) for each in ({}, SM100)),
        *((selection._drop, {"BLOCK": selection._SELECTED, **each}) for each in ({}, SM100)),
    ],
)  # fmt: skip
def test_the_small_kernels_compile_without_spills(kernel: Any, constants: dict[str, Any]) -> None:
    warps = {gumbel._rank: 8, selection._hide: 1, drawn._draw_children: children.warps_for(4096)}
    if kernel is traversal._accept:
        warps[kernel] = traversal.warps_for(constants["NODES"])
    used = compiled(kernel, warps.get(kernel, 4), **constants)
    assert used["stack"] == 0, used


@pytest.mark.parametrize(
    ("candidates", "children_each", "width", "words", "nodes", "shift"),
    [
        (64, 4, 4, 2, 0, 0), (64, 4, 4, 2, 1, -1), (1024, 8, 8, 4, 16, 0),
        (4096, 8, 16, 16, 64, -1), (8192, 8, 32, 32, 0, -1), (8192, 8, 32, 32, 64, 0),
    ],
)  # fmt: skip
def test_growth_holds_a_requests_candidates_without_spills(
    candidates: int, children_each: int, width: int, words: int, nodes: int, shift: int
) -> None:
    left_out = {} if shift else dict.fromkeys(("ROW_POSITIONS", "ROW_ABOVE"))
    used = of_growth(
        growth._expand, children.warps_for(candidates), nodes, K=children_each, WIDTH=width,
        WORDS=words, CANDIDATES=candidates, LANES=max(1, nodes), SHIFT=shift, **left_out,
    )  # fmt: skip
    assert used["stack"] == 0, used


@pytest.mark.parametrize(("nodes", "shift"), [(0, 0), (1, -1), (64, 0)])
def test_trees_are_stored_without_spills(nodes: int, shift: int) -> None:
    for kernel, constants in (
        (growth._order, {"RANKED": growth._RANKED, "AGAINST": growth._AGAINST, "NODES": 1024,
                         "LANES": triton.next_power_of_2(nodes + 8)}),
        (stored.store, {"FEATURED": True, "ROWS": growth._RANKED, "WORDS": 32, "SHIFT": shift}),
    ):  # fmt: skip
        used = of_growth(kernel, 4, nodes, K=8, **constants)
        assert used["stack"] == 0, used


@pytest.mark.parametrize(("nodes", "learned"), [(1, False), (64, True)])
def test_tries_are_grafted_without_spills(nodes: int, learned: bool) -> None:
    used = compiled(
        grafts._graft, grafts.WARPS, GRAFTS=nodes, NODES=nodes, CHILDREN=8, K=8, LEARNED=learned,
        NOISE=True,
    )  # fmt: skip
    assert used["stack"] == 0, used


@pytest.mark.parametrize(
    ("nodes", "levels", "ranked", "grammar"),
    [(16, 8, False, False), (256, 32, True, False), (1024, 64, True, True)],
)
def test_the_walk_holds_a_requests_tree_without_spills(
    nodes: int, levels: int, ranked: bool, grammar: bool
) -> None:
    warps, tile = walk.tiling(nodes, levels)
    used = compiled(
        walk._walk, warps, GRAMMAR=grammar, RANKED=ranked, NODES=nodes, LEVELS=levels, TILE=tile
    )
    assert used["stack"] == 0, used


@pytest.mark.parametrize(
    ("blocks", "kept", "nodes", "width", "learned"),
    [
        (16, 4, 0, 8, True), (16, 4, 1, 1, False), (64, 8, 16, 8, True),
        (128, 64, 0, 8, False), (128, 64, 64, 1, True), (128, 64, 64, 32, True),
    ],
)  # fmt: skip
def test_the_best_of_a_vocabularys_blocks_are_merged_without_spills(
    blocks: int, kept: int, learned: bool, nodes: int, width: int
) -> None:
    used = of_growth(
        children._merge, children.warps_for(max(blocks * kept, width * blocks if nodes else 0)),
        nodes, K=kept, KEPT=kept, ROUNDS=kept, LEARNED=learned, RANKS=kept, ENTRIES=blocks * kept,
        BLOCKS=blocks, NODES=max(1, nodes), ROWS=width, NOISE=True,
    )  # fmt: skip
    assert used["stack"] == 0, used


@CAPABILITIES
@pytest.mark.parametrize("nodes", [16, 64])
def test_trees_pass_recurrent_layers_without_spills(nodes: int, capability: int) -> None:
    """The shapes are those of Nemotron-H and of Qwen3-Next."""
    warps = 4 if nodes <= 32 else 8
    space = {"GROUP": 16, "P": 64, "WIDTH": 128, "BP": 32, "BK": 16}
    delta = {"GROUP": 2, "KEYS": 128, "VALUES": 128, "BK": 16, "BV": 32}
    convolved = {"WIDTH": 4, "BC": recurrence.CHANNELS, "SILU": True}
    for kernel, warps_of, constants in (
        (recurrence._space_trees, warps, space),
        (recurrence._delta_trees, warps, delta),
        (recurrence._convolve_trees, 4, convolved),
    ):
        used = compiled(kernel, warps_of, capability=capability, NODES=nodes, **constants)
        assert used["stack"] == 0, (kernel, used)
        assert used["shared"] <= 227 * 1024, (kernel, used)


@pytest.mark.parametrize(
    "rows", [MOST_RECURRENT_ROWS, pytest.param(2 * MOST_RECURRENT_ROWS, marks=pytest.mark.slow)]
)
def test_no_larger_tree_than_is_admitted_passes_recurrent_layers(rows: int) -> None:
    space = {"GROUP": 16, "P": 64, "WIDTH": 128, "BP": 32, "BK": 16}
    used = compiled(recurrence._space_trees, 8, NODES=rows, **space)
    # GPUs of capability 8.6 have 99 KiB, and the largest ones 227.
    fits = rows == MOST_RECURRENT_ROWS
    assert (used["shared"] <= 99 * 1024) if fits else (used["shared"] > 227 * 1024), used


@CAPABILITIES
def test_states_are_committed_without_spills(capability: int) -> None:
    for kernel, constants in (
        (state_commits._space_commit, {"GROUP": 16, "P": 64, "WIDTH": 128, "BP": 32, "BK": 128}),
        (state_commits._delta_commit,
         {"GROUP": 2, "KEYS": 128, "VALUES": 128, "BK": 128, "BV": 32}),
        (state_commits._keep_history, {"ENTRIES": 3, "BE": 4, "BC": recurrence.CHANNELS}),
    ):  # fmt: skip
        used = compiled(kernel, 4, capability=capability, ALIGNED=16, **constants)
        assert used["stack"] == 0, kernel

"""Every Triton kernel but attention compiles for sm_90 ahead of time, and spills no registers.

`test_compiled_attention` has attention.
"""

from __future__ import annotations

from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="these kernels are written in Triton")

from ahead_of_time import (  # noqa: E402
    CAPABILITIES,
    HAS_TOOLS,
    NO_TOOLS,
    POINTERS,
    compiled,
)

from dyntree_kernels.cuda import (  # noqa: E402
    children,
    draft_rows,
    drawn,
    grafts,
    growth,
    gumbel,
    kv_move,
    learn,
    look_up,
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
BY_CHANNEL = {"GROUP": 1, "LOGS": None, "BIAS": None,
              "types": POINTERS | dict.fromkeys(("GATE", "BETA"), "*fp32")}  # fmt: skip
"""Of a delta rule whose channels decay by themselves."""
OF_DRAFT = {"SIZE": 64, "RANKS": 64, "BLOCKS": 64}
"""Of a draft's distribution, and of the logits of a vocabulary of 128 Ki."""
SM100 = {"capability": 100}
SIZES = ((1024, {}), (64, SM100))
SHIFTS = (0, -1)
"""Positions of a draft's rows, less those of their tokens."""


def of_growth(kernel: Any, warps: int, nodes: int, **constants: Any) -> dict[str, int]:
    """Do as `compiled` for tries of so many nodes; without tries if there are none."""
    left_out = () if nodes else OF_TRIES[kernel]
    return compiled(kernel, warps, GRAFTS=nodes, **dict.fromkeys(left_out), **constants)


@pytest.mark.parametrize(
    ("kernel", "constants"),
    [
        (kv_move._move, {"PAGE": 16, "ALIGN": 16, "ROWS": kv_move._ROWS, "WORDS": 128}),
        (place._place, {"ROWS": 64}), (place._place_packed, {"ROWS": 64}),
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
        *((kernel, {"COLUMNS": 1024, **more, **each}) for each in ({}, SM100) for kernel, more in (
            (selection._hide, {}), (selection._measure, {}),
            (selection._drop, {"BLOCK": selection._SELECTED}))),
    ],
)  # fmt: skip
def test_the_small_kernels_compile_without_spills(kernel: Any, constants: dict[str, Any]) -> None:
    warps = {gumbel._rank: 8, drawn._draw_children: children.warps_for(4096)}
    warps |= dict.fromkeys((selection._hide, selection._measure), 1)
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
    """The shapes are those of Nemotron-H, of Qwen3-Next and of Ling-3.0."""
    warps = 4 if nodes <= 32 else 8
    space = {"GROUP": 16, "P": 64, "WIDTH": 128, "BP": 32, "BK": 16}
    delta = {"GROUP": 2, "KEYS": 128, "VALUES": 128, "BK": 16, "BV": 32}
    convolved = {"WIDTH": 4, "BC": recurrence.CHANNELS, "SILU": True}
    for kernel, warps_of, constants in (
        (recurrence._space_trees, warps, space),
        (recurrence._delta_trees, warps, delta),
        (recurrence._delta_trees, warps, delta | BY_CHANNEL),
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
        (state_commits._delta_commit,
         {"KEYS": 128, "VALUES": 128, "BK": 128, "BV": 32, **BY_CHANNEL}),
        (state_commits._keep_history, {"ENTRIES": 3, "BE": 4, "BC": recurrence.CHANNELS}),
    ):  # fmt: skip
        used = compiled(kernel, 4, capability=capability, ALIGNED=16, **constants)
        assert used["stack"] == 0, kernel

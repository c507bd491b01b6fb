"""The model's result as tables for a page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from benchmarks import roofline
from benchmarks.gpu_model import published
from benchmarks.gpu_model.model import (
    ASSUMED,
    BLOCK_PASSES,
    BUDGETS,
    PAIRINGS,
    Assumed,
    Compared,
    Load,
    Pairing,
    best_tree,
    compared,
    whole_trees,
)
from dyntree_plugin.options.shape import ADAPTIVE_FORWARDS, default_shape

BATCHES = (1, 4, 8, 16, 32, 64, 128, 256)
TEMPERATURES = (0.0, 0.6, 1.0)
CONTEXTS = (1000, 8000)
LIMITS = (4, 6, 8, 10, 12, 16, 24)
"""Most draft forwards."""

VARIED = {
    "as assumed": ASSUMED,
    "half of the tokens accepted": replace(ASSUMED, share=0.5),
    "layers take twice their least time": replace(ASSUMED, launches=2.0),
    "twice dyntree's and vLLM's launches": replace(
        ASSUMED, captured=2 * ASSUMED.captured, outside=2 * ASSUMED.outside
    ),
    "4 ms more with a tree or a chain": replace(ASSUMED, tree=4e-3, chain=4e-3),
    "4 ms more with a tree alone": replace(ASSUMED, tree=4e-3),
    "half accepted, 4 ms more with a tree alone": replace(ASSUMED, share=0.5, tree=4e-3),
}
"""Assumptions to vary. Published trees and chains took 2 to 6 ms more than the model says at 8B."""

Cell = Callable[[Compared], str]


def assumptions() -> str:
    """Return what is assumed."""
    told = {
        "GPU": "H200: one for 8B; four with tensor parallelism for 70B and its draft",
        "weights, KV": "bfloat16",
        "draft as an EAGLE-3 head": (
            f"{roofline.EAGLE_3_8B.parameters / 1e6:.0f} M parameters, one layer, "
            f"{roofline.EAGLE_3_8B.vocabulary} tokens"
        ),
        "data sheet's bandwidth that is reached": f"{roofline.REACHED_BANDWIDTH:.0%}",
        "data sheet's operations that are reached": f"{roofline.REACHED_OPERATIONS:.0%}",
        "least time of a layer": f"{1e6 * roofline.LAUNCH_SECONDS:g} µs",
        "time of a step outside of forwards, for every engine": f"{1e3 * ASSUMED.host:g} ms",
        "a small kernel within a graph": f"{1e6 * ASSUMED.captured:g} µs",
        "an operation outside of graphs, and a graph's replay": f"{1e6 * ASSUMED.outside:g} µs",
        "kernels in graphs of a step with f draft forwards": (
            "7 + 3 (f − 1) for growing, 3 for walking, moving and learning, 3 for look-up; "
            "7 + 2 (f − 1) more for a head"
        ),
        "operations and replays outside": "31 + f",
        "the same of a chain of f tokens": (
            "3 f + 3 kernels and 12 operations, as if all of its drafting were one graph"
        ),
        "a block chain of dyntree, beyond a tree": (
            "9 + 10 f kernels and 16 operations; for each token of the chain and entry of the "
            f"vocabulary, {BLOCK_PASSES} numbers in fp32 read or written beyond vLLM's six"
        ),
    }
    lines = [f"| {name} | {value} |" for name, value in told.items()]
    return "\n".join(["| assumed | value |", "|---|---|", *lines])


def _grid(cell: Cell, context: int, temperatures: tuple[float, ...] = TEMPERATURES) -> str:
    """Return a table with a row for each pairing and temperature, and a column for each batch."""
    lines = [_head("target, draft | temperature", BATCHES)]
    for pairing in PAIRINGS:
        for temperature in temperatures:
            cells = _cells(cell, pairing, temperature, context)
            lines.append(f"| {pairing.name} | {temperature:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _head(first: str, columns: tuple[object, ...]) -> str:
    names = " | ".join(map(str, columns))
    rule = "|---" * (1 + first.count("|")) + "|---:" * len(columns)
    return f"| {first} | {names} |\n{rule}|"


def _cells(
    cell: Cell,
    pairing: Pairing,
    temperature: float,
    context: int,
    batches: tuple[int, ...] = BATCHES,
    assumed: Assumed = ASSUMED,
) -> Iterator[str]:
    for requests in batches:
        found = compared(pairing, Load(requests, temperature, context), assumed)
        yield "no room" if found is None else cell(found)


def ratio(value: float) -> str:
    """Return a factor, and in bold one that loses."""
    told = f"{value:.2f}"
    return f"**{told}**" if float(told) < 1 else told


def over_none() -> str:
    return _grid(lambda found: ratio(found.over_none), CONTEXTS[0])


def over_chain() -> str:
    return _grid(lambda found: ratio(found.over_chain), CONTEXTS[0])


def block_chains() -> str:
    """Return what dyntree's block chains give over no speculation, and over the best chain."""

    def cell(found: Compared) -> str:
        return f"{ratio(found.block_over_none)}, {ratio(found.block_over_chain)}"

    return _grid(cell, CONTEXTS[0], TEMPERATURES[1:])


def long_context() -> str:
    def cell(found: Compared) -> str:
        return f"{ratio(found.over_none)}, {ratio(found.over_chain)}"

    return _grid(cell, CONTEXTS[1], (0.0, 1.0))


def shapes() -> str:
    """Return nodes and forwards of the best tree, and the length of the best chain."""

    def cell(found: Compared) -> str:
        tree = f"{found.tree.nodes}/{found.tree.step.forwards}" if found.tree.nodes else "none"
        return f"{tree}, {found.chain.nodes}"

    return _grid(cell, CONTEXTS[0])


def budgets() -> str:
    """Return what each budget gives: cut to what pays, and whole with the default forwards."""
    pairing = PAIRINGS[0]
    lines = [_head("temperature | nodes", BATCHES)]
    for temperature in (0.0, 1.0):
        for whole in (False, True):
            for budget in BUDGETS:
                name = f"{budget}, whole" if whole else f"{budget}"
                cells = []
                for requests in BATCHES:
                    load = Load(requests, temperature)
                    found = compared(pairing, load)
                    if found is None:
                        cells.append("no room")
                        continue
                    tree = (
                        whole_trees(pairing, load, budget)[default_shape(budget)[0]]
                        if whole
                        else best_tree(pairing, load, budgets=(budget,))
                    )
                    over = tree.tokens_per_second / found.none.tokens_per_second
                    cells.append(ratio(over))
                lines.append(f"| {temperature:g} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def limits() -> str:
    """Return the best speed with at most so many draft forwards, over that with the default."""
    lines = [_head("target, draft | temperature | requests", LIMITS)]
    for pairing in PAIRINGS:
        for temperature in (0.0, 1.0):
            for requests in (1, 16):
                load = Load(requests, temperature)
                default = best_tree(pairing, load, most_forwards=ADAPTIVE_FORWARDS)
                cells = [
                    best_tree(pairing, load, most_forwards=limit).tokens_per_second
                    / default.tokens_per_second
                    for limit in LIMITS
                ]
                told = " | ".join(f"{each:.2f}" for each in cells)
                lines.append(f"| {pairing.name} | {temperature:g} | {requests} | {told} |")
    return "\n".join(lines)


def fixed() -> str:
    """Return, for whole trees of one request, the forwards that are best beside the default."""
    lines = [_head("target, draft | temperature", tuple(f"{b} nodes" for b in BUDGETS))]
    for pairing in PAIRINGS:
        for temperature in (0.0, 1.0):
            cells = []
            for budget in BUDGETS:
                trees = whole_trees(pairing, Load(1, temperature), budget)
                best = max(trees, key=lambda forwards: trees[forwards].tokens_per_second)
                default = trees[default_shape(budget)[0]].tokens_per_second
                cells.append(f"{best}: {default / trees[best].tokens_per_second:.2f}")
            lines.append(f"| {pairing.name} | {temperature:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def sensitivity() -> str:
    """Return speed over no speculation and over the best chain, if an assumption is wrong."""
    batches = (1, 8, 16, 64)

    def cell(found: Compared) -> str:
        return f"{ratio(found.over_none)}, {ratio(found.over_chain)}"

    lines = [_head("target, draft | temperature | assumed", batches)]
    for pairing in PAIRINGS[:2]:
        for temperature in (0.0, 1.0):
            for name, assumed in VARIED.items():
                cells = " | ".join(
                    _cells(cell, pairing, temperature, CONTEXTS[0], batches, assumed)
                )
                lines.append(f"| {pairing.name} | {temperature:g} | {name} | {cells} |")
    return "\n".join(lines)


def beside_published() -> str:
    """Return published steps beside the model's."""
    lines = [
        "| engine, source | setting | tokens per step | **published** ms per step | modelled | "
        "**published** speed-up | modelled |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in published.rows():
        speculative = row["kind"] != "none"
        setting = row["setting"]
        if speculative:
            setting += f", {row['kind']}, {row['forwards']} forwards"
        speed_ups = (
            f"**{row['published_speed_up']:.2f}** | {row['modelled_speed_up']:.2f}"
            if speculative
            else "– | –"
        )
        lines.append(
            f"| {row['engine']}, {row['source']} | {setting} | {row['tokens_per_step']:.2f} | "
            f"**{1e3 * row['published_seconds']:.1f}** | {1e3 * row['modelled_seconds']:.1f} | "
            f"{speed_ups} |"
        )
    return "\n".join(lines)


TABLES: dict[str, Callable[[], str]] = {
    "gpu_assumptions": assumptions,
    "gpu_over_none": over_none,
    "gpu_over_chain": over_chain,
    "gpu_block_chains": block_chains,
    "gpu_shapes": shapes,
    "gpu_long_context": long_context,
    "gpu_budgets": budgets,
    "gpu_limits": limits,
    "gpu_fixed": fixed,
    "gpu_sensitivity": sensitivity,
    "gpu_published": beside_published,
}
"""The tables of the page, by their names there."""

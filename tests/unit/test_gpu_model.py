"""The model of a GPU: what it reckons, and that the file has what the command prints."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks import fleet, laboratory
from benchmarks.gpu_model import model, published, result
from benchmarks.gpu_model.model import (
    ASSUMED,
    BUDGETS,
    CATCH_UP_ALONE,
    PAIRINGS,
    Load,
    best_chain,
    best_tree,
    block_step,
    chain_step,
    compared,
    none,
    point,
    tree_step,
    whole_trees,
)
from benchmarks.gpu_model.tables import TEMPERATURES, VARIED, ratio
from benchmarks.laboratory import BLOCK, CHAIN, TREE, Drafted
from benchmarks.roofline import H200, LLAMA_8B, forward_seconds
from dyntree_plugin.options.shape import default_shape

RESULTS = Path(fleet.__file__).parent / "results"
SMALL, HEAD, LARGE, _ = PAIRINGS
ALONE = Load(1, 0.0)
TREE_OF_16 = Drafted(nodes=16, tokens=5, forwards=8, expanded=29)
CHAIN_OF_8 = Drafted(nodes=8, tokens=4, forwards=8, expanded=8)


def test_a_step_takes_its_forwards_and_its_launches() -> None:
    step = tree_step(TREE_OF_16, width=4, head=False)
    target = forward_seconds(LLAMA_8B, H200, 17, 1000, 1, 17 * 1000)
    catch_up, later = (
        forward_seconds(SMALL.draft, H200, rows, 1000, 1, rows * 1000) for rows in (9, 4)
    )
    launches = (7 + 3 * 7 + 3 + 3) * ASSUMED.captured + (26 + 5 + 1 + 7) * ASSUMED.outside
    expected = target + catch_up + 7 * later + launches + ASSUMED.host
    assert point(SMALL, step, ALONE).seconds == pytest.approx(expected)


def test_a_chain_starts_less_than_a_tree_and_a_head_more() -> None:
    chain = chain_step(CHAIN_OF_8)
    tree, of_head = (tree_step(TREE_OF_16, 4, head) for head in (False, True))
    assert chain.operations < tree.operations
    assert chain.kernels < tree.kernels < of_head.kernels


def test_no_tree_costs_the_catch_up() -> None:
    """dyntree without a tree is a little slower than vLLM without speculation."""
    bare = point(SMALL, tree_step(CATCH_UP_ALONE, 4, head=False), ALONE)
    assert bare.tokens_per_second < none(SMALL, ALONE).tokens_per_second


def test_attention_over_a_long_context_costs_operations() -> None:
    short, long = (forward_seconds(LLAMA_8B, H200, 4096, 0, 1, 4096 * n) for n in (0, 8000))
    assert long > 1.2 * short


def test_trees_pay_less_the_more_requests_there_are() -> None:
    found = [compared(SMALL, Load(requests, 1.0)) for requests in (1, 16, 256)]
    gains = [each.over_none for each in found if each is not None]
    assert len(gains) == len(found)
    assert gains == sorted(gains, reverse=True)


def test_where_nothing_is_accepted_no_tree_is_made() -> None:
    useless = replace(ASSUMED, share=0.0)
    assert best_tree(SMALL, Load(16, 0.0), useless).nodes == 0


def test_a_larger_budget_or_more_forwards_are_never_worse() -> None:
    """A larger budget has wider forwards, but its trees are cut to fewer nodes where that pays."""
    speeds = [
        best_tree(SMALL, ALONE, budgets=BUDGETS[: n + 1]).tokens_per_second
        for n in range(len(BUDGETS))
    ]
    assert speeds == sorted(speeds)
    deeper = [best_tree(SMALL, ALONE, most_forwards=f).tokens_per_second for f in (2, 8, 24)]
    assert deeper == sorted(deeper)


def test_every_default_of_whole_trees_was_measured() -> None:
    for budget in BUDGETS:
        assert default_shape(budget)[0] in whole_trees(SMALL, ALONE, budget)


def test_drawn_chains_are_verified_in_the_better_way() -> None:
    """Blocks accept more of a drawn chain; a greedy chain draws nothing."""
    for pairing in (SMALL, HEAD):
        load = Load(1, 1.0)
        best = best_chain(pairing, load)
        lengths = {each.nodes: each for each in laboratory.by_depth(BLOCK, 1.0)}
        assert best.step.drafted == lengths[best.nodes]
        one_by_one = [
            point(pairing, chain_step(each), load) for each in laboratory.by_depth(CHAIN, 1.0)
        ]
        assert best.tokens_per_second > max(each.tokens_per_second for each in one_by_one)


def test_a_block_chain_of_dyntree_costs_more_than_one_of_vllm_and_reads_the_vocabulary() -> None:
    ours, theirs = block_step(CHAIN_OF_8, 4, head=False), chain_step(CHAIN_OF_8)
    assert ours.kernels > theirs.kernels
    assert ours.operations > theirs.operations
    without = replace(ours, passes=0)
    load = Load(64, 1.0)
    extra = point(SMALL, ours, load).seconds - point(SMALL, without, load).seconds
    numbers = 64 * 8 * model.BLOCK_PASSES * LLAMA_8B.vocabulary
    assert extra == pytest.approx(4 * numbers / (0.8 * H200.bandwidth))


def test_greedy_requests_have_trees_beside_block_chains() -> None:
    greedy, drawn = (compared(SMALL, Load(1, temperature)) for temperature in (0.0, 1.0))
    assert greedy is not None
    assert drawn is not None
    assert greedy.block == greedy.tree
    assert drawn.block != drawn.tree


def test_each_variation_makes_trees_slower() -> None:
    speeds = {
        name: best_tree(HEAD, ALONE, assumed).tokens_per_second for name, assumed in VARIED.items()
    }
    first, *others = speeds.values()
    assert all(each < first for each in others)


def test_what_does_not_fit_into_the_memory_is_not_compared() -> None:
    assert compared(SMALL, Load(64, 0.0, 8000)) is not None
    assert compared(SMALL, Load(256, 0.0, 8000)) is None


def test_more_nodes_and_more_forwards_were_measured_to_give_more_tokens() -> None:
    for temperature in TEMPERATURES:
        found = laboratory.by_depth(TREE, temperature)
        for depth in {each.forwards for each in found}:
            tokens = [each.tokens for each in found if each.forwards == depth]
            assert tokens == sorted(tokens)
        for method in (CHAIN, BLOCK) if temperature else (CHAIN,):
            chains = [each.tokens for each in laboratory.by_depth(method, temperature)]
            # Long drawn chains differ by less than their noise.
            assert chains == pytest.approx(sorted(chains), rel=0.02)


def test_blocks_were_measured_to_accept_more_of_a_drawn_chain() -> None:
    for temperature in TEMPERATURES[1:]:
        one_by_one, blocks = (
            {each.nodes: each.tokens for each in laboratory.by_depth(method, temperature)}
            for method in (CHAIN, BLOCK)
        )
        assert blocks.keys() == one_by_one.keys()
        # A chain of one token is verified in the same way.
        assert blocks[1] == pytest.approx(one_by_one[1], rel=0.03)
        assert all(blocks[length] > 1.02 * one_by_one[length] for length in blocks if length > 3)


def test_the_model_is_near_published_plain_steps_and_below_speculative_ones() -> None:
    for row in published.rows():
        known = row["modelled_seconds"] / row["published_seconds"]
        assert (0.85 if row["kind"] == "none" else 0.5) < known < 1.15


def test_a_factor_below_one_is_marked() -> None:
    assert ratio(1.0) == "1.00"
    assert ratio(0.996) == "1.00"
    assert ratio(0.9) == "**0.90**"


def test_the_result_file_is_what_the_model_says() -> None:
    told = json.loads((RESULTS / "gpu-model.json").read_text())
    assert told["kind"] == "model"
    assert told["assumed"] == asdict(ASSUMED)
    assert told["cells"] == result.modelled()
    assert told["published"] == published.rows()

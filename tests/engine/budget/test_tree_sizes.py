"""If the scheduler sizes trees, vLLM's schedule has every size; if the worker does, it has none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

from dyntree_plugin.engine.configuration import mark_as_tree, size_trees_by_step
from dyntree_plugin.options.options import DynTreeOptions
from dyntree_plugin.tree.budget.choice import node_buckets


def sized(
    device: str = "cuda",
    *,
    asynchronous: bool = True,
    requests: int = 64,
    ranks: int = 1,
    **options: str,
) -> set[int]:
    """Return the sizes in vLLM's table after the plugin has settled; empty if it has none."""
    speculation: Any = SimpleNamespace(
        method="draft_model",
        num_speculative_tokens=24,
        num_speculative_tokens_per_batch_size=None,
    )
    mark_as_tree(speculation, DynTreeOptions.parse(options).resolve(24))
    config: Any = SimpleNamespace(
        speculative_config=speculation,
        scheduler_config=SimpleNamespace(async_scheduling=asynchronous, max_num_seqs=requests),
        parallel_config=SimpleNamespace(world_size=ranks),
    )
    size_trees_by_step(config, device)
    schedule = speculation.num_speculative_tokens_per_batch_size
    return {*build_dynamic_sd_schedule_lookup(schedule, requests, 24)[1:]} if schedule else set()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_on_cuda_vllm_knows_every_size(asynchronous: bool) -> None:
    every = {*node_buckets(24, fill_tiles=True)}
    assert sized(asynchronous=asynchronous) == every == {0, 1, 3, 7, 15, 24}


@pytest.mark.parametrize("nodes", [1, 2, 3, 15, 16, 63, 64, 1000])
def test_on_cuda_trees_below_the_budget_fill_tiles_with_their_roots(nodes: int) -> None:
    none, *smaller, most = node_buckets(nodes, fill_tiles=True)
    assert (none, most) == (0, nodes)
    assert [1 + size for size in smaller] == [2 << k for k in range(len(smaller))]
    assert 2 << len(smaller) >= 1 + nodes


def test_of_few_requests_the_largest_sizes_are_known_and_that_there_may_be_none() -> None:
    assert sized(requests=5) == {0, 3, 7, 15, 24}
    assert sized(requests=3) == {0, 15, 24}
    assert sized(requests=2) == {0, 24}
    assert sized(requests=1) == {24}


def test_the_worker_of_one_synchronous_rank_on_a_cpu_sizes_trees() -> None:
    assert sized("cpu", asynchronous=False) == set()
    assert sized("cpu", asynchronous=True) == {*node_buckets(24)}
    assert sized("cpu", asynchronous=False, ranks=2) == {*node_buckets(24)}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fixed_budgets_have_whole_trees(device: str) -> None:
    assert sized(device, budget="fixed") == set()
    assert sized(device, growth="chain") == set()

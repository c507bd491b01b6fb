"""The recorder of trees."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from dyntree_kernels.contracts import BESIDE, BOTH, DRAFT, LOOK_UP, Walked
from dyntree_plugin.engine.step.trees import TreeStore
from dyntree_plugin.engine.telemetry.trace import TreeTrace
from dyntree_plugin.options.options import DynTreeOptions


def test_a_trace_has_verified_nodes_alone_with_their_sources() -> None:
    """The second request's tree is cut to two nodes; the third request has none."""
    trees = TreeStore(3, DynTreeOptions(max_depth=2).resolve(4), 8, torch.device("cpu"))
    trees.parents[:3] = torch.tensor([-1, -1, 0, 1])
    trees.values[:3] = 0.0
    trees.kinds[0] = torch.tensor([LOOK_UP, DRAFT, BOTH, BESIDE])
    trees.kinds[1] = torch.tensor([BOTH, LOOK_UP, DRAFT, DRAFT])
    counts, roots = torch.tensor([2, 4, 0]), torch.tensor([0, 5, 10])
    batch: Any = SimpleNamespace(
        idx_mapping=torch.tensor([1, 0, 2]),
        num_tokens=15,
        req_ids=["b", "a", "c"],
        input_ids=torch.arange(15) + 20,
    )
    path, tokens = torch.full((3, 2), -1), torch.zeros(3, 3, dtype=torch.int64)
    tokens[:, 0] = 99
    trace = TreeTrace()
    trace.add(Walked(path, tokens, roots, roots, counts, roots, roots, roots), batch, trees)
    kept = {step["request_id"]: step for step in trace.take()}
    assert kept["a"]["sources"] == ["look_up", "draft", "both", "draft"]
    assert kept["b"]["sources"] == ["both", "look_up"]
    assert (kept["a"]["tokens"], kept["b"]["tokens"]) == ([26, 27, 28, 29], [21, 22])
    assert len(kept) == 2

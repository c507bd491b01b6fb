"""Nothing on the step path waits for the device, and the algorithm needs no vLLM."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

import dyntree_plugin
from dyntree_plugin.drafters.candidates import temperature_scaled, top_children
from dyntree_plugin.engine.trees import TreeStore
from dyntree_plugin.tree.growth.topk import TopKGrowth
from dyntree_plugin.tree.shape import TreeShape
from dyntree_plugin.tree.token_tree import TokenTree
from dyntree_plugin.tree.verify.match import Accepted, match

PACKAGE = Path(dyntree_plugin.__file__).parent
STEP_PATH = sorted(
    [
        *(PACKAGE / "tree" / "growth").glob("*.py"),
        *(PACKAGE / "tree" / "verify").glob("*.py"),
        *(PACKAGE / "drafters").glob("*.py"),
        *(PACKAGE / "engine" / f"{name}.py" for name in (
            "speculator", "runner", "verifier", "trees", "kv", "stats"
        )),
    ]
)  # fmt: skip

WAITING = {"item", "tolist", "cpu", "numpy", "nonzero", "synchronize", "masked_select", "unique"}
ON_THE_HOST = ("_np", "_cpu_upper_bound")
"""Endings of vLLM's names for what it keeps on the host."""
EXCUSE = "# sync:"
"""Marks a line that may wait, and why."""


def waiting_calls(source: str) -> list[str]:
    """Calls of tensor methods that wait for the device, without those that are marked."""
    lines = source.splitlines()
    found = []
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        on_host = ast.unparse(node.func.value).endswith(ON_THE_HOST)
        line = lines[node.lineno - 1]
        if node.func.attr in WAITING and not on_host and EXCUSE not in line:
            found.append(f"line {node.lineno}: {line.strip()}")
    return found


@pytest.mark.parametrize("path", STEP_PATH, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_step_function_calls_a_tensor_method_that_waits(path: Path) -> None:
    assert waiting_calls(path.read_text()) == []


@pytest.mark.parametrize(
    ("line", "waits"),
    [
        ("count = lengths.sum().item()", True),
        ("values = batch.counts[slots].tolist()", True),
        ("values = batch.cu_num_logits_np.tolist()", False),
        ("bound = batch.seq_lens_cpu_upper_bound.numpy()", False),
        ("values = counts.tolist()  # sync: after the step", False),
    ],
)
def test_the_search_for_waiting_calls_tells_them_apart(line: str, waits: bool) -> None:
    assert bool(waiting_calls(line)) is waits


def grow(shape: TreeShape, requests: int, vocab: int) -> TokenTree:
    temperature = torch.ones(requests)
    growth = TopKGrowth(requests, shape, torch.full((requests,), 100))
    chain = torch.zeros(requests, dtype=torch.bool)

    def children(rows: int) -> tuple[torch.Tensor, ...]:
        scores = temperature_scaled(
            torch.randn(requests * rows, vocab), temperature.repeat_interleave(rows)
        )
        found = top_children(scores, shape.children, chain.repeat_interleave(rows))
        return tuple(x.view(requests, rows, shape.children) for x in found)

    growth.add(*children(1))
    for _ in range(shape.max_depth - 1):
        growth.frontier()
        growth.add(*children(shape.width))
    return growth.finish()


def verify(shape: TreeShape, tree: TokenTree, vocab: int) -> Accepted:
    requests = tree.tokens.shape[0]
    trees = TreeStore(requests, shape, tree.tokens.device)
    trees.put(torch.arange(requests), tree)
    sampled = torch.randint(0, vocab, (requests, shape.node_budget + 1))
    valid = torch.arange(shape.node_budget) < trees.counts[:, None]
    return match(
        tree.tokens, trees.parents, trees.depths, trees.ancestors, valid, sampled, shape.max_depth
    )


def test_growing_and_verifying_need_no_value_on_the_host() -> None:
    """On fake tensors, which have shapes and no values: what asks for a value raises."""
    shape = TreeShape(node_budget=40, max_depth=4, width=3, children=5)
    with FakeTensorMode():
        accepted = verify(shape, grow(shape, 6, 50), 50)
    assert accepted.path.shape == (6, 4)
    assert accepted.tokens.shape == (6, 5)


@pytest.mark.parametrize("waits", [lambda x: x.sum().item(), lambda x: x[x > 0]])
def test_fake_tensors_do_raise_where_a_value_is_needed(waits: object) -> None:
    with (
        FakeTensorMode(),
        pytest.raises((DataDependentOutputException, DynamicOutputShapeException)),
    ):
        waits(torch.randn(4))  # type: ignore[operator]


@pytest.mark.parametrize("package", ["tree", "drafters"])
def test_the_algorithm_imports_no_vllm(package: str) -> None:
    modules = [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for path in sorted((PACKAGE / package).rglob("*.py"))
    ]
    assert len(modules) > 1
    code = (
        f"import importlib, sys; [importlib.import_module(m) for m in {modules!r}]; "
        "sys.exit(sorted(m for m in sys.modules if m.split('.')[0] == 'vllm')[:5] or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

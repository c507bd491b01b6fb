"""Nothing on the step path waits for the device, and the algorithm needs no vLLM."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

import dyntree_plugin
from dyntree_plugin.drafters.children import ChildPicker, DraftRows
from dyntree_plugin.engine.trees import TreeStore
from dyntree_plugin.tree.growth import GrowthConfig, plan_growth
from dyntree_plugin.tree.names import Rule
from dyntree_plugin.tree.plan import TreePlan
from dyntree_plugin.tree.shape import TreeShape
from dyntree_plugin.tree.value import AcceptanceEstimate, outcomes, temperature_class
from dyntree_plugin.tree.verify.match import Accepted, match
from dyntree_plugin.tree.verify.rules import DRAWN_RULES, allowed_rules, default_rule

PACKAGE = Path(dyntree_plugin.__file__).parent
STEP_PATH = sorted(
    [
        *(PACKAGE / "tree" / "growth").glob("*.py"),
        *(PACKAGE / "tree" / "verify").glob("*.py"),
        *(PACKAGE / "drafters").glob("*.py"),
        PACKAGE / "tree" / "value.py",
        *(PACKAGE / "engine" / f"{name}.py" for name in (
            "speculator", "compiled_growth", "draft_forwards", "runner", "verifier", "trees", "kv",
            "stats", "batch", "transfer", "gpu/runner", "gpu/clock", "gpu/transfer",
            "gpu/verification", "gpu/speculator", "gpu/draft_rows", "gpu/graphs",
            "attention/buffers", "attention/gpu", "attention/kernels",
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


SHAPE = TreeShape(node_budget=40, max_depth=4, width=3, children=5)
VOCAB, REQUESTS = 50, 6
GROWN: list[GrowthConfig] = [
    GrowthConfig(),
    GrowthConfig("dyspec"),
    GrowthConfig("threshold"),
    GrowthConfig("dynamic_threshold"),
    GrowthConfig("expansion", expansion=(2, 3, 1)),
    GrowthConfig("sequoia", acceptance=(0.6, 0.2, 0.1)),
    GrowthConfig("sequoia", acceptance=(0.6, 0.2, 0.1), sampling="best"),
    GrowthConfig("chain"),
]


def plan_of(growth: GrowthConfig, rule: Rule | None = None) -> TreePlan:
    growing = plan_growth(growth, SHAPE)
    shape = replace(SHAPE, max_depth=len(growing.widths) + 1)
    return TreePlan(shape, growth, rule or default_rule(growing.sampling), calibration=True)


def noise(logits: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return logits + torch.rand_like(logits)


def propose(plan: TreePlan, estimate: AcceptanceEstimate) -> TreeStore:
    """Grow as the engine does, and store the trees."""
    pick = ChildPicker(plan, noise, estimate)
    growth = plan.growing.start(REQUESTS, torch.full((REQUESTS,), 100))
    features = []

    def add(width: int) -> None:
        rows = torch.zeros(REQUESTS * width, dtype=torch.int64)
        logits = torch.randn(REQUESTS * width, VOCAB)
        of_rows = DraftRows(torch.ones_like(rows).float(), rows, rows, rows.bool(), rows, rows)
        found = pick(logits, of_rows, all_greedy=False).by_request(REQUESTS)
        growth.add(*found[:3])
        if found.features is not None:
            features.append(found.features.flatten(1, 2))

    add(1)
    for width in plan.growing.widths:
        growth.frontier()
        add(width)
    trees = TreeStore(REQUESTS, plan, VOCAB, torch.device("cpu"))
    slots = torch.arange(REQUESTS)
    trees.put(slots, growth.finish(), torch.cat(features, dim=1) if features else None)
    return trees


def verify(trees: TreeStore) -> Accepted:
    plan, nodes = trees.plan, trees.shape.node_budget
    request = torch.arange(REQUESTS)
    counts = trees.counts[request]
    tokens = torch.randint(0, VOCAB, (REQUESTS, nodes))
    if not plan.reads_draws:
        sampled = torch.randint(0, VOCAB, (REQUESTS, nodes + 1))
        valid = torch.arange(nodes) < counts[:, None]
        of_tree = (each[request] for each in (trees.parents, trees.depths, trees.ancestors))
        return match(tokens, *of_tree, valid, sampled, trees.shape.max_depth)
    probs = torch.randn(REQUESTS, nodes + 1, VOCAB).softmax(dim=2)
    uniforms = torch.rand(REQUESTS, trees.shape.max_depth, plan.growing.children)
    walk = DRAWN_RULES[plan.rule].walk(
        tokens, trees.draws(request), counts, lambda at: probs[request, at + 1], uniforms
    )
    return walk.emit(tokens, torch.rand(REQUESTS, VOCAB))


@pytest.mark.parametrize("growth", GROWN, ids=lambda g: f"{g.name}-{g.sampling}")
def test_growing_verifying_and_learning_need_no_value_on_the_host(growth: GrowthConfig) -> None:
    """On fake tensors, which have shapes and no values: what asks for a value raises."""
    # What is known before any token is worked out on the host, once.
    plan_growth(growth, SHAPE).start(1, torch.zeros(1))
    for rule in allowed_rules(growth.name, plan_of(growth).growing.sampling):
        plan = plan_of(growth, rule)
        with FakeTensorMode(allow_non_fake_inputs=True):
            estimate = AcceptanceEstimate("cpu")
            trees = propose(plan, estimate)
            accepted = verify(trees)
            if plan.calibrated:
                slots = torch.arange(REQUESTS)
                valid = torch.arange(trees.shape.node_budget) < trees.counts[slots, None]
                seen = outcomes(trees.parents[slots], accepted.path, valid)
                classes = temperature_class(torch.ones(REQUESTS))
                estimate.observe(trees.features[slots], *seen, classes)
        assert accepted.path.shape == (REQUESTS, plan.shape.max_depth)
        assert accepted.tokens.shape == (REQUESTS, plan.shape.max_depth + 1)


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

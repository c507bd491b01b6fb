"""Nothing on the step path waits for the device, and the algorithm does not need vLLM."""

from __future__ import annotations

import ast
import importlib.util
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

import dyntree_kernels
import dyntree_plugin
from dyntree_plugin.engine.drawn.store import DrawStore
from dyntree_plugin.engine.step.trees import TreeStore
from dyntree_plugin.tree.children import ChildPicker, DraftRows
from dyntree_plugin.tree.growth import GrowthConfig
from dyntree_plugin.tree.pairs import allowed_rules, default_rule
from dyntree_plugin.tree.plan import TreePlan
from dyntree_plugin.tree.registry import DRAWN_RULES, plan_growth
from dyntree_plugin.tree.shape import TreeShape
from dyntree_plugin.tree.token_tree import Accepted
from dyntree_plugin.tree.value import AcceptanceEstimate

PACKAGE = Path(dyntree_plugin.__file__).parent
KERNELS = Path(dyntree_kernels.__file__).parent
STEP_PATH = {
    str(path.relative_to(root.parent)): path
    for root, patterns in (
        (PACKAGE, ("tree/**/*.py", "engine/*.py", "engine/[!c]*/**/*.py", "engine/cuda/*.py")),
        (KERNELS, ("*.py", "cuda/*.py")),
    )
    for pattern in patterns
    for path in sorted(root.glob(pattern))
}
"""All modules except those of the CPU, whose tensors are on the host."""


WAITING = {
    "item", "tolist", "cpu", "numpy", "nonzero", "argwhere", "synchronize", "masked_select",
    "unique", "unique_consecutive", "bincount", "equal", "allclose", "is_nonzero",
}  # fmt: skip
"""Methods of tensors and functions of torch that wait."""
EXCUSE = "# sync:"
"""Marks a line that may wait, and says why."""


def waits(call: ast.Call) -> bool:
    """Return whether a call waits, whatever it is called on."""
    if not isinstance(call.func, ast.Attribute):
        return False
    owner, name = ast.unparse(call.func.value), call.func.attr
    given = ", ".join(ast.unparse(each) for each in (*call.args, *call.keywords))
    to_host = name == "to" and "'cpu'" in given and "non_blocking=True" not in given
    places = owner == "torch" and name == "where" and len(call.args) == 1
    on_host = owner == "np" or owner.endswith(("_np", "_cpu_upper_bound"))  # vLLM's names
    return (name in WAITING or to_host or places) and not on_host


def waiting(source: str) -> list[str]:
    """Return the lines with a call that waits, without those that are marked."""
    lines = source.splitlines()
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    found = sorted({call.lineno for call in calls if waits(call)})
    return [f"line {n}: {lines[n - 1].strip()}" for n in found if EXCUSE not in lines[n - 1]]


def test_no_step_function_calls_what_waits_for_the_device() -> None:
    """A value that is read without a call is found by `FakeTensorMode` below, and by captures."""
    found = {name: waiting(path.read_text()) for name, path in STEP_PATH.items()}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("count = lengths.sum().item()", True),
        ("found = torch.where(lengths > 0)", True),
        ("same = torch.equal(lengths, positions)", True),
        ("tokens = lengths.to(device=torch.device('cpu'))", True),
        ("values = batch.cu_num_logits_np.tolist()", False),
        ("values = lengths.tolist()  # sync: after the step", False),
        ("values = lengths.to('cpu', non_blocking=True)", False),
        ("found = torch.where(lengths > 0, lengths, 0)", False),
        ("counts = np.bincount(found, minlength=3)", False),
    ],
)
def test_what_waits_is_found_and_nothing_else(line: str, found: bool) -> None:
    assert bool(waiting(line)) == found


SHAPE = TreeShape(node_budget=40, max_depth=4, width=3, children=5)
VOCAB, REQUESTS = 50, 6
GROWN: list[GrowthConfig] = [
    GrowthConfig("dyspec"),
    GrowthConfig("threshold"),
    GrowthConfig("expansion", (2, 3, 1)),
    GrowthConfig("sequoia", (0.6, 0.2, 0.1)),
    GrowthConfig("sequoia", (0.6, 0.2, 0.1), sampling="best"),
    GrowthConfig("chain"),
]


def plan_of(growth: GrowthConfig, rule: str | None = None) -> TreePlan:
    growing = plan_growth(growth, SHAPE)
    shape = replace(SHAPE, max_depth=len(growing.widths) + 1)
    return TreePlan(shape, growth, rule or default_rule(growing.sampling), calibration=True)


def noise(logits: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return logits + torch.rand_like(logits)


def propose(plan: TreePlan, estimate: AcceptanceEstimate) -> tuple[TreeStore, DrawStore]:
    """Grow trees as the engine does, and store them."""
    pick = ChildPicker(plan, noise, estimate)
    assert plan.growing.start is not None
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
    slots, tree = torch.arange(REQUESTS), growth.finish()
    trees.put(slots, tree, torch.cat(features, dim=1) if features else None)
    draws = DrawStore(REQUESTS, plan, VOCAB, torch.device("cpu"), kept_tokens=0)
    if tree.draws is not None:
        draws.put(slots, tree.draws)
    return trees, draws


def verify(trees: TreeStore, draws: DrawStore) -> Accepted:
    """Walk by a rule that reads draws; all others are kernels."""
    plan, nodes = trees.plan, trees.shape.node_budget
    request = torch.arange(REQUESTS)
    counts = trees.counts[request]
    tokens = torch.randint(0, VOCAB, (REQUESTS, nodes))
    probs = torch.randn(REQUESTS, nodes + 1, VOCAB).softmax(dim=2)
    uniforms = torch.rand(REQUESTS, trees.shape.max_depth, plan.growing.children)
    walk = DRAWN_RULES[plan.rule].walk(
        tokens, draws.draws(request), counts, lambda at: probs[request, at + 1], uniforms
    )
    return walk.emit(tokens, torch.rand(REQUESTS, VOCAB))


@pytest.mark.parametrize("growth", GROWN, ids=lambda g: f"{g.name}-{g.sampling}")
def test_growing_and_verifying_need_no_value_on_the_host(growth: GrowthConfig) -> None:
    """Run on fake tensors, which have shapes but no values. Reading a value raises."""
    # The host computes these once, before any token is known.
    plan_growth(growth, SHAPE).start(1, torch.zeros(1))
    for rule in allowed_rules(growth.name, plan_of(growth).growing.sampling):
        plan = plan_of(growth, rule)
        with FakeTensorMode(allow_non_fake_inputs=True):
            estimate = AcceptanceEstimate("cpu")
            trees, draws = propose(plan, estimate)
            if not plan.reads_draws:
                continue
            accepted = verify(trees, draws)
        assert accepted.path.shape == (REQUESTS, plan.shape.max_depth)
        assert accepted.tokens.shape == (REQUESTS, plan.shape.max_depth + 1)


@pytest.mark.parametrize("waits", [lambda x: x.sum().item(), lambda x: x[x > 0]])
def test_fake_tensors_do_raise_where_a_value_is_needed(waits: object) -> None:
    with (
        FakeTensorMode(),
        pytest.raises((DataDependentOutputException, DynamicOutputShapeException)),
    ):
        waits(torch.randn(4))  # type: ignore[operator]


@pytest.mark.parametrize("folder", [PACKAGE / "tree", KERNELS], ids=lambda folder: folder.name)
def test_the_algorithm_and_the_kernels_import_no_vllm(folder: Path) -> None:
    root = KERNELS.parent if folder == KERNELS else PACKAGE.parent
    names = [path.relative_to(root).with_suffix("") for path in sorted(folder.rglob("*.py"))]
    of_cuda = {name for name in names if "cuda" in name.parts}
    there = set(names) - (set() if importlib.util.find_spec("triton") else of_cuda)
    modules = [".".join(name.parts) for name in sorted(there)]
    assert len(modules) > 1
    strangers = {"vllm", "dyntree_plugin"} if folder == KERNELS else {"vllm"}
    code = (
        f"import importlib, sys; [importlib.import_module(m) for m in {modules!r}]; "
        f"sys.exit(sorted(m for m in sys.modules if m.split('.')[0] in {strangers!r})[:5] or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

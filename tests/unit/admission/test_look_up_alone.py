"""Engines without a draft model: what is admitted, what is refused, and what start-up says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from configurations import (
    ON_CUDA,
    UNCHECKED,
    Build,
    admit,
    changed,
    not_built,
    refusal_of,
    with_all,
)

from dyntree_kernels.tries import MOST_ON_CUDA
from dyntree_plugin import plugin
from dyntree_plugin.engine import configuration
from dyntree_plugin.engine.configuration import WORKERS, plan_in_force, tree_plan
from dyntree_plugin.options.options import DynTreeOptions

NGRAM = {"method": "ngram", "num_speculative_tokens": 16}


def alone(method: str = "ngram", **speculation: Any) -> dict[str, Any]:
    """Return arguments of an engine without a draft model."""
    return {"speculative_config": NGRAM | {"method": method} | speculation}


@pytest.mark.parametrize("method", ["ngram", "ngram_gpu"])
def test_look_up_alone_is_admitted(build: Build, method: str, logged: Callable[[], str]) -> None:
    config = build(**alone(method))
    plan = tree_plan(config)
    assert plan is not None
    assert plan == plan_in_force(config.speculative_config)
    assert (plan.has_draft, plan.shape.grafts) == (False, 16)
    assert config.parallel_config.worker_cls == WORKERS["cpu"]
    assert "There is no draft model" in logged()


@pytest.mark.parametrize(("device", "nodes"), [("cpu", 128), ("cuda", MOST_ON_CUDA)])
def test_tries_are_no_larger_than_the_device_makes_them(
    build: Build,
    logged: Callable[[], str],
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    nodes: int,
) -> None:
    config = build(speculative={"num_speculative_tokens": 128})
    config = with_all(changed(config, *UNCHECKED), ON_CUDA)
    monkeypatch.setattr(configuration, "is_marked", lambda _: False)
    logged()
    plugin.admit(config, DynTreeOptions(), device)
    plan = tree_plan(config)
    assert plan is not None
    assert (plan.shape.node_budget, plan.shape.grafts) == (128, nodes)
    assert (f"at most {nodes} nodes" in logged()) is (device == "cuda")


def test_on_cuda_trees_of_look_up_alone_are_no_larger_than_a_trie(build: Build) -> None:
    larger = alone(num_speculative_tokens=MOST_ON_CUDA + 1)
    for arguments, device, fits in (
        (larger, "cpu", True),
        (larger, "cuda", False),
        (larger | {"dyntree": {"node_budget": MOST_ON_CUDA}}, "cuda", True),
    ):
        config = with_all(changed(build(**arguments), *UNCHECKED), ON_CUDA)
        options = arguments.get("dyntree", {})
        if fits:
            admit(config, device, **options)
            continue
        reason = refusal_of(config, device, **options)
        assert "node_budget=65 is too large without a draft" in reason


def test_no_slots_are_reserved_and_no_draft_is_compiled_without_a_draft_model(
    build: Build,
) -> None:
    """Controls: with one there are slots for every node that it runs on, and models are compiled
    for the rows of its largest forward, as vLLM stops at a forward of more; without trees neither.
    """
    sizes = {"max_num_seqs": 128, "max_num_batched_tokens": 2048}
    without, with_draft = build(**alone(), **sizes), build(**sizes)
    plain = build(**sizes, additional_config={}, speculative_config=None)
    assert without.num_lookahead_tokens == plain.num_lookahead_tokens == 0
    assert with_draft.num_lookahead_tokens > 16
    ends = [
        config.compilation_config.get_compile_ranges()[-1].end
        for config in (without, with_draft, plain)
    ]
    assert ends == [2048, 128 * 17, 2048]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"dyntree": {"width": 2}}, "dyntree.width=2 has no effect without a draft model"),
        ({"dyntree": {"max_forwards": 2}}, "dyntree.max_forwards=2 has no effect without a draft"),
        ({"enable_prompt_embeds": True}, "enable_prompt_embeds=True"),
    ],
)
def test_what_look_up_alone_cannot_serve_is_refused(
    build: Build, arguments: dict[str, Any], named: str
) -> None:
    assert named in not_built(build, **alone(), **arguments)

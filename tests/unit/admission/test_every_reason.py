"""A refusal gives every reason, and no reason hides another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from configurations import refusal_of, with_all

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CHANGES = {
    "parallel_config.ubatch_size": 2,
    "scheduler_config.scheduler_cls": "my.Scheduler",
    "model_config.is_diffusion": True,
}
NAMED = ("ubatch_size=2", "scheduler_cls='my.Scheduler'", "target model: is_diffusion=True")


@pytest.mark.parametrize("method", ["draft_model", "medusa"])
def test_reasons_of_all_kinds_are_given_at_once(admitted: VllmConfig, method: str) -> None:
    of_speculation = {
        "speculative_config.method": method,
        "speculative_config.use_heterogeneous_vocab": True,
        "speculative_config.draft_model_config.use_mla": True,
    }
    reason = refusal_of(with_all(admitted, CHANGES | of_speculation), node_budget=17)
    budget = "dyntree.node_budget=17 exceeds num_speculative_tokens=16"
    for named in (*NAMED, budget, "use_heterogeneous_vocab=True"):
        assert named in reason
    served = method == "draft_model"
    assert (f"speculative_config.method={method!r} is not supported" in reason) != served
    # The draft of another method is not one that could be served.
    assert ("use_mla (target, draft)=(False, True)" in reason) == served

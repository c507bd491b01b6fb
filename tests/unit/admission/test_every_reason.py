"""A refusal gives every reason, and no reason hides another."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any

import pytest
from configurations import changed, refusal_of

from dyntree_plugin.admission import check
from dyntree_plugin.engine.configuration import WORKERS
from dyntree_plugin.options.options import DynTreeOptions

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CHANGES = {
    "parallel_config.ubatch_size": 2,
    "scheduler_config.scheduler_cls": "my.Scheduler",
    "model_config.is_diffusion": True,
}
NAMED = ("ubatch_size=2", "scheduler_cls='my.Scheduler'", "target model: is_diffusion=True")


def with_all(config: VllmConfig, changes: Mapping[str, Any]) -> VllmConfig:
    return reduce(lambda found, path: changed(found, path, changes[path]), changes, config)


@pytest.mark.parametrize("method", ["draft_model", "medusa"])
def test_reasons_of_all_kinds_are_given_at_once(admitted: VllmConfig, method: str) -> None:
    of_speculation = {
        "speculative_config.method": method,
        "speculative_config.draft_sample_method": "probabilistic",
        "speculative_config.parallel_drafting": True,
        "speculative_config.draft_model_config.use_mla": True,
    }
    reason = refusal_of(with_all(admitted, CHANGES | of_speculation), node_budget=17)
    budget = "dyntree.node_budget=17 exceeds num_speculative_tokens=16"
    for named in (*NAMED, budget, "draft_sample_method='probabilistic'"):
        assert named in reason
    served = method == "draft_model"
    assert (f"speculative_config.method={method!r} is not supported" in reason) != served
    # The draft of another method is not one that could be served.
    assert ("use_mla (target, draft)=(False, True)" in reason) == served
    assert "parallel_drafting=True" in reason


@pytest.mark.parametrize(
    ("device", "of_device", "named"),
    [
        ("cpu", {"parallel_config.data_parallel_backend": "ray"}, "data_parallel_backend='ray'"),
        (
            "cuda",
            {
                "attention_config.backend_per_kind": {"full_attention": "FLASHINFER"},
                "parallel_config.worker_cls": "auto",
            },
            "attention_config.backend_per_kind=",
        ),
    ],
)
def test_without_speculation_all_other_reasons_are_given(
    admitted: VllmConfig, device: str, of_device: dict[str, Any], named: str
) -> None:
    without = with_all(admitted, CHANGES | of_device | {"speculative_config": None})
    with pytest.raises(check.Refused) as refused:
        check.refuse_unserved(without, DynTreeOptions(), device, WORKERS)
    for each in (*NAMED, "speculative_config is missing", named):
        assert each in str(refused.value)

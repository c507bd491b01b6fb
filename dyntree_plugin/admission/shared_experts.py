"""What cannot be combined with data-parallel ranks that share the experts of a target.

All ranks make the target's forwards together, and each of them drafts alone.
"""

from __future__ import annotations

from typing import Any

from dyntree_plugin.admission.refusals import Refusal, ranks_of_experts
from dyntree_plugin.admission.uncompared import Targets
from dyntree_plugin.options.methods import proposes_blocks

_SHARED = Targets(
    "data_parallel_size of a mixture of experts", ranks_of_experts, lambda c: c.parallel_config
)


def _has_experts(speculation: Any) -> bool:
    """Return whether a draft has experts. vLLM's EAGLE-3 heads have none, whatever the file of a
    head says of its target."""
    return speculation.method != "eagle3" and bool(speculation.draft_model_config.is_moe)


EXPERT_REFUSALS = (
    Refusal(
        "enable_elastic_ep",
        lambda c: c.parallel_config.enable_elastic_ep,
        bool,
        "trees were not made for ranks that come and go; leave it out",
    ),
    _SHARED.refusal(
        "target's uses_mrope",
        lambda c: c.model_config.uses_mrope,
        bool,
        "not compared yet with decoding without trees; use another target, or one rank",
    ),
    *_SHARED.uncompared("pipeline_parallel_size", "enable_lora"),
)
"""Checks of ``VllmConfig``."""

EXPERT_DRAFT_REFUSALS = (
    Refusal(
        "draft's experts, data_parallel_size of a mixture of experts",
        lambda s: (_has_experts(s), ranks_of_experts(s.target_parallel_config)),
        all,
        "each rank drafts with as many forwards as its own requests need, and experts would wait "
        "for those of the other ranks; use an EAGLE-3 head, a draft without experts, or look-up",
    ),
    Refusal(
        "method, data_parallel_size of a mixture of experts",
        lambda s: (proposes_blocks(s) and s.method, ranks_of_experts(s.target_parallel_config)),
        all,
        "block drafts were not compared on such ranks; use an EAGLE-3 head, a draft without "
        "experts, or look-up",
    ),
)
"""Checks of a ``SpeculativeConfig`` with a draft model or a head."""

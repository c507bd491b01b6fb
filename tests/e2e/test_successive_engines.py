"""An engine with trees leaves nothing in its process that changes the next engine."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from successive import BROKEN, start_in_turn

GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "head_dim": 32,
    "sliding_window": 16,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 30.0,
    "query_pre_attn_scalar": 32,
    "hidden_activation": "gelu_pytorch_tanh",
}
"""A model whose layers have a window and a soft cap."""


@pytest.mark.e2e
@pytest.mark.slow
def test_engines_with_and_without_trees_follow_each_other_in_a_process(
    model_folder: Callable[..., str],
) -> None:
    plain = {"model": model_folder(**GEMMA2), "load_format": "dummy", "skip_tokenizer_init": True}
    orders = (["trees", "plain", BROKEN, "plain"], ["plain"])
    several, fresh = (start_in_turn(kinds, plain) for kinds in orders)
    first, between, second, unguarded = several
    assert between == fresh[0]
    assert between["classes"] == ["CPUAttentionBackend", "CPUAttentionBackendImpl"]
    assert first == second
    assert first["classes"] == ["TreeCPUAttentionBackend", "TreeCPUAttentionImpl"]
    # Control: without the cleanup, the engine would have the attention of trees.
    assert unguarded["classes"] == first["classes"]

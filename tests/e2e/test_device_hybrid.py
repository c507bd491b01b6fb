"""On a GPU, a target with Qwen3-Next's layers and random weights: the tokens are those without
trees, but for rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import workload
from comparison import accepted_per_step
from random_engines import NODES, RUN, Target
from random_targets import qwen3_next_of_8_layers

pytestmark = [pytest.mark.gpu, pytest.mark.e2e]


def test_tokens_differ_by_rounding_alone(tmp_path: Path, tell: Callable[[str], None]) -> None:
    """Control: without commits more of them differ."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    common = qwen3_next_of_8_layers(tmp_path) | {
        "dtype": "bfloat16",
        "enforce_eager": False,
        "kv_cache_memory_bytes": 2 << 30,
        "gpu_memory_utilization": 0.1,
    }
    plain = workload.without_tree() | common | {"max_logprobs": -1}
    del plain["worker_cls"]  # vLLM's worker runs its V2 runner on a GPU
    trees = workload.without_draft(NODES, "ngram_gpu", budget="fixed") | common
    dropped = replace(RUN, sabotage="commit_dropped")
    name, of_plain = "draft in bfloat16", "plain in bfloat16"
    served = Target(
        {
            of_plain: (plain, {"sound": RUN}),
            name: (trees, {"sound": RUN, "again": RUN, "commit_dropped": dropped}),
        }
    )
    judged = served.in_half()
    tell(f"Qwen3-Next with 8 layers in bfloat16: {judged}")
    assert judged.unexcused == 0
    assert accepted_per_step(served.served(name)["sound"]) > 0.3
    assert served.differing(name, "commit_dropped", of_plain) > judged.excused

"""On a GPU, targets of random weights with recurrent layers and with latent attention: the tokens
are those without trees, but for rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import workload
from comparison import accepted_per_step
from latent_targets import deepseek_v3_of_8_layers
from random_engines import NODES, RUN, Target
from random_targets import qwen3_next_of_8_layers

pytestmark = [pytest.mark.gpu, pytest.mark.e2e]

TARGETS: dict[str, tuple[Callable[[Path], dict[str, Any]], str]] = {
    "Qwen3-Next": (qwen3_next_of_8_layers, "commit_dropped"),
    "DeepSeek-V3": (deepseek_v3_of_8_layers, "without_kv_move"),
}
"""What writes them, and what breaks their trees."""


@pytest.mark.parametrize("kind", TARGETS)
def test_tokens_differ_by_rounding_alone(
    kind: str, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    """Control: more of them differ where trees are broken."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    make, broken = TARGETS[kind]
    common = make(tmp_path) | {
        "dtype": "bfloat16",
        "enforce_eager": False,
        "kv_cache_memory_bytes": 2 << 30,
        "gpu_memory_utilization": 0.1,
    }
    plain = workload.without_tree() | common | {"max_logprobs": -1}
    del plain["worker_cls"]  # vLLM's worker runs its V2 runner on a GPU
    trees = workload.without_draft(NODES, "ngram_gpu", budget="fixed") | common
    name, of_plain = "draft in bfloat16", "plain in bfloat16"
    served = Target(
        {
            of_plain: (plain, {"sound": RUN}),
            name: (trees, {"sound": RUN, "again": RUN, broken: replace(RUN, sabotage=broken)}),
        }
    )
    judged = served.in_half()
    tell(f"{kind} with 8 layers in bfloat16: {judged}")
    assert judged.unexcused == 0
    assert accepted_per_step(served.served(name)["sound"]) > 0.3
    assert served.differing(name, broken, of_plain) > judged.excused

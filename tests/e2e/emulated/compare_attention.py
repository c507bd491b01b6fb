"""Compare the stand-in for vLLM's kernel of attention with that kernel, in Triton's interpreter.

As a program, this prints the largest difference of the outputs, and how much a place of an image
changes them.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from emulated.device import _interpret_vllms

_interpret_vllms(
    ("vllm.v1.attention.ops.triton_attention_helpers",
     "vllm.v1.attention.ops.triton_unified_attention")
)  # fmt: skip

from vllm.v1.attention.ops.triton_unified_attention import unified_attention  # noqa: E402

from emulated.attention import _unified_attention  # noqa: E402

ROWS, LENGTHS = (20, 1, 7, 12), (40, 33, 30, 12)
IMAGES = [[(22, 30), (33, 36)], [(5, 20), (0, 0)], [(10, 26), (0, 0)], [(0, 0), (0, 0)]]
"""After text, and before it; before the row; of which the cache holds a part; none.

vLLM gives the kernel none that is larger than a window, but where it may not leave that."""
BLOCK, HEADS, KV_HEADS, SIZE = 16, 4, 2, 32


def _batch(window: int, clamped: bool, images: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    blocks = [-(-length // BLOCK) for length in LENGTHS]
    table = torch.arange(len(ROWS) * max(blocks)).int().view(len(ROWS), -1)
    cache = torch.randn(table.numel(), BLOCK, KV_HEADS, 2 * SIZE)
    return {
        "q": torch.randn(sum(ROWS), HEADS, SIZE),
        "k": cache[..., :SIZE],
        "v": cache[..., SIZE:],
        "out": torch.zeros(sum(ROWS), HEADS, SIZE),
        "cu_seqlens_q": torch.tensor([0, *ROWS]).cumsum(0).int(),
        "max_seqlen_q": max(ROWS),
        "seqused_k": torch.tensor(LENGTHS).int(),
        "max_seqlen_k": max(LENGTHS),
        "softmax_scale": 0.2,
        "causal": True,
        "window_size": (window - 1, 0) if window else (-1, -1),
        "block_table": table,
        "softcap": 0,
        "q_descale": None,
        "k_descale": None,
        "v_descale": None,
        "mm_prefix_range": torch.tensor(IMAGES).int() if images else None,
        "mm_prefix_clamp_sliding_window": clamped,
    }


def _output(kernel: Any, *kind: Any) -> torch.Tensor:
    batch = _batch(*kind)
    kernel(**batch)
    found: torch.Tensor = batch["out"]
    return found


def main() -> None:
    apart, moved = [], []
    for window, clamped in ((0, False), (20, False), (6, True), (20, True)):
        own = _output(_unified_attention, window, clamped, True)
        apart.append(float((own - _output(unified_attention, window, clamped, True)).abs().max()))
        moved.append(float((own - _output(unified_attention, window, clamped, False)).abs().max()))
    sys.stdout.write(f"{json.dumps([max(apart), min(moved)])}\n")


if __name__ == "__main__":
    main()

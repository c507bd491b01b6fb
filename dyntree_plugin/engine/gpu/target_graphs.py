"""Which of the target's CUDA graphs may serve a batch of trees."""

from __future__ import annotations

from typing import Any

WIDEST = 2
"""Times its own rows that a batch may be padded to."""


def offer_larger(manager: Any) -> None:
    """Let a uniform batch be padded to any graph of its tree size, not to the next alone.

    vLLM's ``CudaGraphManager`` offers a batch the graphs of the next larger number of rows. Where
    there are graphs of several tree sizes, those are often of another, and the batch would run
    without a graph. Call it when the manager is made.
    """
    graphs = {desc for offered in manager._candidates.values() for desc in offered}
    uniform = sorted(
        (desc for desc in graphs if desc.uniform_token_count), key=lambda desc: desc.num_tokens
    )
    if len({desc.uniform_token_count for desc in uniform}) < 2:
        return
    for (rows, loras), offered in manager._candidates.items():
        larger = [
            desc
            for desc in uniform
            if rows <= desc.num_tokens <= WIDEST * rows and desc.num_active_loras == loras
        ]
        # What is offered already and fits comes first among equals: FULL graphs, then piecewise.
        rest = [desc for desc in offered if desc not in larger]
        manager._candidates[rows, loras] = [*larger, *rest]

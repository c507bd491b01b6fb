"""A draft model that lies whole on the last stage of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from vllm import envs
from vllm.distributed import parallel_state

_PARTITION = "VLLM_PP_LAYER_PARTITION"


@dataclass(frozen=True)
class OneStage:
    """What vLLM's models ask of their pipeline group, for a model that is not split."""

    rank_in_group: int = 0
    world_size: int = 1
    is_first_rank: bool = True
    is_last_rank: bool = True


@contextmanager
def as_one_stage() -> Iterator[None]:
    """Make or run a model within as if the pipeline had one stage.

    vLLM's models ask ``get_pp_group`` which of their layers they hold, and whether they embed
    tokens or take hidden states. A draft model on the last stage of a pipeline would be made
    without its first layers (``make_layers``), and without embeddings. ``VLLM_PP_LAYER_PARTITION``
    is about the target's layers alone.
    """
    if parallel_state.get_pp_group().world_size == 1:
        yield
        return
    state, variables = vars(parallel_state), vars(envs)
    stock, state["_PP"] = state["_PP"], OneStage()
    # A variable is a name in the module only while it is replaced.
    variables[_PARTITION] = None
    try:
        yield
    finally:
        state["_PP"] = stock
        del variables[_PARTITION]

"""All ranks of an engine must make the same trees. Ranks on several nodes are started by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.parallel_state import get_world_group

from dyntree_plugin import __version__
from dyntree_plugin.engine.configuration import tree_plan

if TYPE_CHECKING:
    from vllm.config import VllmConfig

WAIT = timedelta(seconds=120)
"""Most time to wait for the other ranks. They have just formed their groups together."""

_REMEDY = (
    "start every node with the same dyntree, the same --speculative-config and the same --dyntree"
)


def check_ranks(vllm_config: VllmConfig) -> None:
    """Compare the trees of all ranks before any model loads; every rank must call it.

    Raises:
        ValueError: naming what differs and on which rank, or if a rank has no trees.
    """
    ranks = get_world_group()
    if ranks.world_size == 1:
        return
    try:
        torch.distributed.monitored_barrier(ranks.cpu_group, WAIT, wait_all_ranks=True)
    except RuntimeError as error:
        raise ValueError(
            f"a rank of this engine ended or has no trees; {_REMEDY}: {error}"
        ) from error
    told: list[Any] = [None] * ranks.world_size
    torch.distributed.all_gather_object(told, trees_of(vllm_config), group=ranks.cpu_group)
    if found := differences(told):
        raise ValueError(f"the ranks of this engine differ in {', '.join(found)}; {_REMEDY}")


def trees_of(vllm_config: VllmConfig) -> dict[str, Any]:
    """Return what ranks must have in common. Paths of models may differ from node to node."""
    plan, speculation = tree_plan(vllm_config), vllm_config.speculative_config
    method = None if speculation is None else speculation.method
    in_force = {} if plan is None else plan.in_force()
    return {"version of dyntree": __version__, "method": method, **in_force}


def differences(told: Sequence[Mapping[str, Any]]) -> list[str]:
    """Describe every name whose values differ from rank to rank.

    ``told``: what the ranks sent, in order of rank.
    """
    names = dict.fromkeys(name for one in told for name in one)
    values = {name: [one.get(name) for one in told] for name in names}
    return [
        f"{name} ({', '.join(f'rank {rank}: {value}' for rank, value in enumerate(found))})"
        for name, found in values.items()
        if any(value != found[0] for value in found)
    ]

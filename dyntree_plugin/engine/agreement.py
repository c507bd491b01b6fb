"""What the ranks of an engine agree on: its trees, what steps cost, and the rows of forwards.

Ranks on several nodes are started by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.parallel_state import get_dp_group, get_tp_group, get_world_group

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


def sizes_alone(vllm_config: VllmConfig, rows: int) -> torch.Tensor | None:
    """Return what vLLM takes for the rows of a draft's forward on every data-parallel rank, int32
    [ranks]; None on one rank.

    Without it vLLM asks every rank before each forward, and ranks draft with different numbers of
    forwards. A draft without experts exchanges nothing, so the other ranks' rows do not matter.
    """
    ranks = vllm_config.parallel_config.data_parallel_size
    return None if ranks == 1 else torch.full((ranks,), rows, dtype=torch.int32)


def agreement_of(vllm_config: VllmConfig) -> Callable[[Any], Any]:
    """Return what gives the first rank's numbers to all ranks that run the target together."""
    groups = [get_tp_group()]
    if vllm_config.parallel_config.data_parallel_size > 1:
        groups.append(get_dp_group())

    def agree(numbers: Any) -> Any:
        for group in groups:
            numbers = group.broadcast_object(numbers)
        return numbers

    return agree

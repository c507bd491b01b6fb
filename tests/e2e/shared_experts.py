"""Data-parallel ranks that share a target's experts: engines in processes of their own.

As a program, this takes the files of a job and of its results, as engine_process.py does. vLLM's
CPU build lacks what such ranks need: two collectives, and a kernel for a part of the experts. This
adds them, and has dyntree admit the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from inspect import signature
from typing import Any
from unittest import mock

import torch
from engine_process import EXECUTOR, Engine, Result, Run, answered, main, result_of
from ranks import UNBOUND
from serving import free_port

ASKED = "asked"
"""The name in ``Result.metrics`` of how often a forward asked the other ranks for their rows."""


def serve_together(
    engine: Mapping[str, Any], runs: Sequence[Mapping[str, Run]]
) -> list[dict[str, Result]]:
    """Start a rank for each of ``runs``, and have it work through its own.

    A rank without requests goes along with the others. All ranks have runs of the same names.
    """
    port = str(free_port())
    arguments = {"enable_expert_parallel": True, EXECUTOR: "uni", **engine}

    def rank(number: int) -> dict[str, Result]:
        variables = {
            "VLLM_DP_SIZE": str(len(runs)),
            "VLLM_DP_RANK": str(number),
            "VLLM_DP_MASTER_PORT": port,
            **UNBOUND,
        }
        found = answered(__file__, arguments, runs[number], threads=1, **variables)
        return {name: result_of(result) for name, result in found.items()}

    with ThreadPoolExecutor(len(runs)) as pool:
        return list(pool.map(rank, range(len(runs))))


class RankOfExperts(Engine):
    """A rank that goes on as long as any of them has requests."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        import vllm.forward_context
        from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

        from dyntree_plugin.admission import check

        communicator: Any = CpuCommunicator
        communicator.all_gatherv, communicator.reduce_scatterv = all_gatherv, reduce_scatterv
        experts: Any = CPUUnquantizedExperts
        experts.apply = of_own_experts(experts.apply)
        self._asked = 0
        with mock.patch.object(check, "CPU_REFUSALS", ()):
            super().__init__(arguments)
        module: Any = vllm.forward_context
        module.coordinate_batch_across_dp = self._ask

    def _ask(self, *, num_tokens_unpadded: int, **_: Any) -> tuple[bool, torch.Tensor, int]:
        """Count, and do not wait for ranks that may not ask: all have as many rows as this one."""
        self._asked += 1
        return False, torch.full((2,), num_tokens_unpadded, dtype=torch.int32), 0

    def _work(self, run: Run) -> Result:
        before = self._asked
        result = super()._work(replace(run, batch=max(1, len(run.requests))))
        if not run.requests:
            list(self._batch(run, [], {}, []))
        result.metrics[ASKED] = self._asked - before
        return result

    def sabotaged(self, name: str) -> AbstractContextManager[None]:
        return globals()[name]() if name in BROKEN else super().sabotaged(name)


def all_gatherv(
    self: Any, input_: torch.Tensor | list[torch.Tensor], dim: int, sizes: Sequence[int]
) -> Any:
    """Join the rows of all ranks, of which each has as many as ``sizes`` says."""
    if isinstance(input_, list):
        return [all_gatherv(self, each, dim, sizes) for each in input_]
    padded = input_.new_zeros(max(sizes), *input_.shape[1:])
    padded[: len(input_)] = input_
    found = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather(found, padded, group=self.device_group)
    return torch.cat([rows[:size] for rows, size in zip(found, sizes, strict=True)])


def reduce_scatterv(
    self: Any, input_: torch.Tensor, dim: int, sizes: Sequence[int]
) -> torch.Tensor:
    """Add up what all ranks have of all rows, and return this rank's rows."""
    total = input_.clone()
    torch.distributed.all_reduce(total, group=self.device_group)
    return total.split(list(sizes))[self.rank_in_group].clone()


def of_own_experts(stock: Callable[..., None]) -> Callable[..., None]:
    """Have vLLM's kernel, which takes the numbers of a rank's own experts, add up those alone."""
    parameters = signature(stock)

    def apply(*given: Any, **named: Any) -> None:
        found = parameters.bind(*given, **named).arguments
        if found["expert_map"] is not None:
            own = found["expert_map"][found["topk_ids"].long()].to(found["topk_ids"].dtype)
            found["topk_weights"] = found["topk_weights"].masked_fill(own < 0, 0)
            found["topk_ids"] = own.clamp(min=0)
        stock(**found)

    return apply


@contextmanager
def asks_before_each_forward() -> Iterator[None]:
    """Leave out the sizes with which a draft's forward is this rank's alone."""
    from dyntree_plugin.engine.drafts import base, draft_model

    with (
        mock.patch.object(draft_model, "sizes_alone", return_value=None),
        mock.patch.object(base, "sizes_alone", return_value=None),
    ):
        yield


@contextmanager
def own_experts_alone() -> Iterator[None]:
    """Leave out what the other ranks' experts add to a row."""
    with mock.patch.object(torch.distributed, "all_reduce", kept_from(torch.float32)):
        yield


def kept_from(dtype: torch.dtype) -> Callable[..., Any]:
    """Return ``all_reduce`` that leaves tensors of this type as they are."""
    stock = torch.distributed.all_reduce
    return lambda given, *a, **k: None if given.dtype == dtype else stock(given, *a, **k)


BROKEN = ("asks_before_each_forward", "own_experts_alone")


if __name__ == "__main__":
    main(RankOfExperts)

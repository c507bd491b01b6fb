"""vLLM's schedulers, counting trees where they count chains."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from dyntree_plugin.engine.requests import EMPTY_TREE, chain_reason
from dyntree_plugin.engine.stats import ATTRIBUTE, TreeSpecDecodingStats, WorkerCounts


class TreeCounting(Scheduler):
    """Takes what the worker counted and hands it on with vLLM's statistics."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._counts: WorkerCounts | None = None
        self._rows: dict[str, int] = {}
        # Counts of steps that verified nothing wait for the next one that does.
        self._unreported: list[WorkerCounts] = []
        self._custom_processors = bool(self.vllm_config.model_config.logits_processors)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        self._counts = getattr(model_runner_output, ATTRIBUTE, None)
        self._rows = model_runner_output.req_id_to_index
        return super().update_from_output(scheduler_output, model_runner_output)

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: SpecDecodingStats | None,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> SpecDecodingStats | None:
        counts = self._counts
        if not self.log_stats or counts is None or not counts.nodes:
            return spec_decoding_stats
        stats = spec_decoding_stats
        if not isinstance(stats, TreeSpecDecodingStats):
            stats = TreeSpecDecodingStats(
                self.num_spec_tokens,
                num_accepted_tokens_per_pos=[0] * self.num_spec_tokens,
                num_draft_tokens_per_pos=[0] * self.num_spec_tokens,
            )
        row = self._rows[request_id]
        nodes = counts.nodes[row]
        stats.observe_tree(nodes, counts.depths[row], num_accepted_tokens, counts.moved[row])
        request = self.requests[request_id]
        reason = chain_reason(request.sampling_params, self._custom_processors)
        if reason is None and nodes == 0:
            reason = EMPTY_TREE
        if reason is not None:
            stats.fall_back(reason)
        return stats

    def make_stats(
        self, spec_decoding_stats: SpecDecodingStats | None = None, *args: Any, **kwargs: Any
    ) -> SchedulerStats | None:
        counts, self._counts = self._counts, None
        if counts is not None and self.log_stats:
            self._unreported.append(counts)
        if isinstance(spec_decoding_stats, TreeSpecDecodingStats):
            for counts in self._unreported:
                spec_decoding_stats.observe_worker(counts)
            self._unreported.clear()
        return super().make_stats(spec_decoding_stats, *args, **kwargs)


class TreeScheduler(TreeCounting):
    """For synchronous scheduling."""


class AsyncTreeScheduler(TreeCounting, AsyncScheduler):
    """For asynchronous scheduling."""

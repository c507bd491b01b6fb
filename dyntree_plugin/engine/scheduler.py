"""vLLM's schedulers with trees: they count trees, and they choose how large the trees are."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from dyntree_kernels.contracts import report_places
from dyntree_plugin.admission.node_limit import node_limit
from dyntree_plugin.engine.budget.by_schedule import FORWARDS, NodeBuckets
from dyntree_plugin.engine.configuration import tree_plan, tree_sizes
from dyntree_plugin.engine.fallback import chain_reason
from dyntree_plugin.engine.grammar.scheduled import TreeGrammars
from dyntree_plugin.engine.telemetry.counts import ATTRIBUTE, WorkerCounts
from dyntree_plugin.engine.telemetry.sources import source_indices
from dyntree_plugin.engine.telemetry.stats import DeliveredMetrics, TreeSpecDecodingStats
from dyntree_plugin.metrics.names import EMPTY_TREE


class TreeCounting(Scheduler):
    """Adds the worker's counts to vLLM's statistics, and chooses the size of the next trees.

    The size and the number of draft forwards are chosen only if the budget is adaptive; see
    `configuration.size_trees_by_step`. The choice follows from what earlier trees were worth.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._grammars = TreeGrammars(self.structured_output_manager)
        # vLLM's scheduler asks it for nothing but what this answers.
        self.structured_output_manager: Any = self._grammars
        self._counts: WorkerCounts | None = None
        self._rows: dict[str, int] = {}
        # Tokens of this step by row, and of the steps whose times are unknown.
        self._emitted: dict[int, int] = {}
        self._delivered: deque[int] = deque()
        self._stats: TreeSpecDecodingStats | None = None
        self._buckets: NodeBuckets | None = None
        plan = tree_plan(self.vllm_config)
        self._chain_reason = (
            None if plan is None else chain_reason(self.vllm_config.model_config, plan.shape)
        )
        if self.dynamic_sd_lookup is not None and plan is not None:
            sizes = tree_sizes(self.vllm_config)
            synchronous = not self.scheduler_config.async_scheduling
            lookup: Any = NodeBuckets(sizes, plan.further_forwards, synchronous=synchronous)
            self._buckets = self.dynamic_sd_lookup = lookup

    def _handle_stopped_request(self, request: Request) -> bool:
        # The last token has no KV. Tokens that a tree had accepted after the stop count as computed
        # but do not belong to the request.
        promised = request.num_output_placeholders
        computed = min(request.num_computed_tokens - promised, request.num_tokens - 1)
        if request.resumable:
            request.num_computed_tokens = computed + promised
        # vLLM caches the blocks of a path when it schedules the next step, and there is none. A
        # preempted request has no blocks.
        if computed > 0:
            self.kv_cache_manager.cache_blocks(request, computed)
        return super()._handle_stopped_request(request)

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        if request.spec_decode_metrics is not None:
            request.spec_decode_metrics = DeliveredMetrics.new(self.num_spec_tokens)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        scheduled = super().schedule(*args, **kwargs)
        if self._buckets is not None:
            setattr(scheduled, FORWARDS, self._buckets.forwards)
        return scheduled

    def _try_schedule_encoder_inputs(
        self,
        request: Request,
        num_computed_tokens: int,
        num_new_tokens: int,
        encoder_compute_budget: int,
        shift_computed_tokens: int = 0,
    ) -> tuple[list[int], int, int, list[int], list[int]]:
        # What a chunk begins with vLLM would split: an image, or what the prefix cache left of one.
        # Trees take more of a step than chains, so that its tokens would not see the same others.
        # What no step has room for would wait for ever.
        begin, end = num_computed_tokens, num_computed_tokens + num_new_tokens
        threshold = self.scheduler_config.long_prefill_token_threshold
        most = min(self.max_num_scheduled_tokens, threshold or self.max_num_scheduled_tokens)
        if self.scheduler_config.disable_chunked_mm_input and any(
            each.mm_position.offset <= begin < end < _end(each.mm_position) <= begin + most
            for each in request.mm_features
        ):
            return [], 0, encoder_compute_budget, [], []
        return super()._try_schedule_encoder_inputs(
            *(request, num_computed_tokens, num_new_tokens, encoder_compute_budget),
            shift_computed_tokens=shift_computed_tokens,
        )

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        limits = {each: self._node_limit(each, 1) for each in scheduler_output.num_scheduled_tokens}
        if limits and all(limit == 0 for limit in limits.values()):
            scheduler_output.num_spec_tokens_to_schedule = 0  # No request wants the next trees.
        super()._update_after_schedule(scheduler_output)
        self._limit_nodes(limits)

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        self._grammars.take(draft_token_ids, self.requests)
        super().update_draft_token_ids(draft_token_ids)
        self._limit_nodes({each: self._node_limit(each) for each in draft_token_ids.req_ids})

    def update_draft_token_ids_in_output(
        self, draft_token_ids: DraftTokenIds, scheduler_output: SchedulerOutput
    ) -> None:
        self._grammars.take(draft_token_ids, self.requests)
        super().update_draft_token_ids_in_output(draft_token_ids, scheduler_output)

    def _limit_nodes(self, limits: Mapping[str, int | None]) -> None:
        """Keep the first nodes of trees whose requests have a limit."""
        for request_id, limit in limits.items():
            if limit is not None:
                request = self.requests[request_id]
                request.spec_token_ids = request.spec_token_ids[:limit]

    def _node_limit(self, request_id: str, begun: int = 0) -> int | None:
        """Return the most nodes of the request's next tree, None without a limit.

        ``begun``: whether a step of the request was scheduled just now. Each step without an output
        gives at least one token, and so does the next one without a tree.
        """
        request = self.requests.get(request_id)
        if request is None:
            return None
        under_way = begun + (begun and request.num_output_placeholders > 0)
        if request.num_output_tokens + under_way + 1 >= request.max_tokens:
            return 0
        return node_limit(request.sampling_params)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        grammar_seconds = self._grammars.take_seconds()
        counts: WorkerCounts | None = getattr(model_runner_output, ATTRIBUTE, None)
        if self._buckets is not None and counts is not None:
            if counts.row_cost is not None:
                self._buckets.measured(counts.row_cost, counts.fewest_forwards)
            rows = scheduler_output.total_num_scheduled_tokens
            counts.budgeted = self._buckets.observe(counts, rows)
        self._take_counts(counts, model_runner_output.req_id_to_index, grammar_seconds)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _take_counts(
        self,
        counts: WorkerCounts | None,
        rows: dict[str, int],
        grammar_seconds: Sequence[float] = (),
    ) -> None:
        """Begin the step's statistics; ``rows``: of the requests in ``counts``."""
        self._counts, self._rows, self._emitted = counts, rows, {}
        self._stats = None
        if counts is not None and self.log_stats:
            of_step = TreeSpecDecodingStats.of_step
            self._stats = of_step(self.num_spec_tokens, counts, grammar_seconds)

    def make_spec_decoding_stats(
        self, spec_decoding_stats: SpecDecodingStats | None, *args: Any, **kwargs: Any
    ) -> SpecDecodingStats | None:
        # vLLM counts here, before it looks for the request's end.
        return spec_decoding_stats

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], *args: Any, **kwargs: Any
    ) -> tuple[list[int], bool]:
        take = super()._update_request_with_output
        if request.use_structured_output:
            taken = self._follow_grammar(take, request, new_token_ids, *args, **kwargs)
        else:
            taken = take(request, new_token_ids, *args, **kwargs)
        row = self._rows[request.request_id]
        self._emitted[row] = len(taken[0])
        parameters = request.sampling_params
        if request.spec_decode_metrics is not None or (parameters and parameters.stop):
            self._observe(request, row)
        return taken

    def _follow_grammar(
        self,
        take: Callable[..., tuple[list[int], bool]],
        request: Request,
        new_token_ids: list[int],
        *args: Any,
        **kwargs: Any,
    ) -> tuple[list[int], bool]:
        """Give the request its tokens up to the first that its grammar refuses, by ``take``."""
        # A thinking budget, for example, forces such a token. What a tree had accepted after it
        # must neither be emitted nor stop the request.
        stopped = False
        for at, token in enumerate(new_token_ids):
            _, stopped = take(request, [token], *args, **kwargs)
            if not self._grammars.read(request, token) or stopped:
                del new_token_ids[at + 1 :]
                break
        return new_token_ids, stopped

    def _observe(self, request: Request, row: int) -> None:
        """Count the step of a request whose metrics are kept, or whose stop strings may cut it."""
        counts, accepted = self._counts, self._emitted[row] - 1
        if counts is None or counts.report is None or not counts.decoding[row]:
            return
        report, at = counts.report[row], report_places(counts.report.shape[1])
        nodes = int(report[at.verified])
        if nodes and isinstance(request.spec_decode_metrics, DeliveredMetrics):
            detailed = self.spec_decode_metrics_level == "detailed"
            request.spec_decode_metrics.count(nodes, accepted, detailed)
        if self._stats and accepted and request.sampling_params and request.sampling_params.stop:
            path = source_indices(report[at.accepted_kinds][:accepted])
            self._stats.paths[request.request_id] = path.tolist()  # sync: host memory

    def make_stats(
        self, spec_decoding_stats: SpecDecodingStats | None = None, *args: Any, **kwargs: Any
    ) -> SchedulerStats | None:
        return super().make_stats(self._complete_stats() or spec_decoding_stats, *args, **kwargs)

    def _complete_stats(self) -> TreeSpecDecodingStats | None:
        """Complete the step's statistics, and return them."""
        stats, counts = self._stats, self._counts
        self._stats = self._counts = None
        if stats is None or counts is None:
            return None
        # vLLM also schedules draft tokens for a request with one prompt token left.
        accepted = {row: n - 1 for row, n in self._emitted.items() if counts.decoding[row]}
        stats.observe_trees(counts, accepted)
        fallen = len(accepted) if self._chain_reason else stats.tree_nodes.count(0)
        if fallen:
            stats.fallbacks[self._chain_reason or EMPTY_TREE] = fallen
        self._delivered.append(sum(self._emitted.values()))
        for tree, plain in counts.compared:
            stats.compare(tree, plain * self._delivered.popleft())
        return stats


def _end(place: Any) -> int:
    """Return the position after those of an image or of another item."""
    return int(place.offset + place.length)


class TreeScheduler(TreeCounting):
    """Schedules synchronously.

    vLLM's synchronous scheduler frees the blocks that the last tokens have passed before it caches
    full ones. Those of recurrent states must be cached first, as its asynchronous scheduler does.
    """

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], *args: Any, **kwargs: Any
    ) -> tuple[list[int], bool]:
        running = request.status == RequestStatus.RUNNING
        found = super()._update_request_with_output(request, new_token_ids, *args, **kwargs)
        if running and self.need_mamba_block_aligned_split:
            known = min(request.num_computed_tokens, request.num_tokens)
            self.kv_cache_manager.cache_blocks(request, known)
        return found


class AsyncTreeScheduler(TreeCounting, AsyncScheduler):
    """Schedules asynchronously.

    In a pipeline, earlier stages advance recurrent states along a step's path some steps later.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.need_mamba_block_aligned_split and self.pp_size > 1:
            manager: Any = self.kv_cache_manager
            manager.allocate_slots = caching_later(manager.allocate_slots)


def caching_later(allocate_slots: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``allocate_slots``: if the request has drafts, a step's blocks are cached with its
    output, and not before.

    vLLM caches a block as soon as its tokens are known. The root of a tree may fill one whose state
    is not there before the path is known, and the next step may give it to another request.
    """

    def allocate(request: Request, *args: Any, **kwargs: Any) -> Any:
        delayed = kwargs.pop("delay_cache_blocks", False) or bool(request.spec_token_ids)
        return allocate_slots(request, *args, delay_cache_blocks=delayed, **kwargs)

    return allocate

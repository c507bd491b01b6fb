"""vLLM's V2 model runner with trees: what all platforms share."""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.sampling_params import SamplingParams
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from dyntree_kernels.learn import Learn
from dyntree_kernels.walk import Walk
from dyntree_plugin.engine.attention.metadata import TreeAttnMetadata, TreeMask
from dyntree_plugin.engine.budget.by_schedule import FORWARDS
from dyntree_plugin.engine.budget.measured_rows import measure_rows
from dyntree_plugin.engine.budget.plain_cost import measure
from dyntree_plugin.engine.configuration import tree_plan, trees_are_cut
from dyntree_plugin.engine.cpu.kv import Move
from dyntree_plugin.engine.fallback import chain_reason, has_custom_processors
from dyntree_plugin.engine.limits import wrap_seeds
from dyntree_plugin.engine.step.clock import Clock
from dyntree_plugin.engine.step.draft import TreeSpeculator
from dyntree_plugin.engine.step.requests import Requests, pack
from dyntree_plugin.engine.step.transfer import Send
from dyntree_plugin.engine.step.trees import TreeStore
from dyntree_plugin.engine.step.verify import TreeVerifier, Verification
from dyntree_plugin.engine.telemetry.stats import CountedOutput, StepRecord, StepTimes, report
from dyntree_plugin.engine.telemetry.trace import TreeTrace
from dyntree_plugin.tree.budget.plain_steps import PlainSteps
from dyntree_plugin.tree.budget.row_cost import RowCost
from dyntree_plugin.tree.children import ChildPicker, Perturb
from dyntree_plugin.tree.value import AcceptanceEstimate

# vLLM shows only what is logged below the name of its own package.
logger = init_logger("vllm.dyntree")


class TreeRunnerMixin(GPUModelRunner):
    """Gives tree rows their positions, mask and verification; the rest is the stock runner's.

    vLLM lays a request's drafts out in consecutive rows and cache slots. Node ``j`` takes row and
    slot ``root + 1 + j``, but the position ``root + depth``: of its RoPE, and of the sampler's
    noise.
    """

    # A platform's runner brings these.
    speculator_type: type[TreeSpeculator] = TreeSpeculator
    verifier_type: type[TreeVerifier] = TreeVerifier
    perturb: Perturb
    walk: Walk
    learn: Learn
    clock: Clock
    send: Send

    def make_clock(self) -> Clock:
        raise NotImplementedError

    def make_send(self) -> Send:
        """How counts come to the host."""
        raise NotImplementedError

    def mover_of(self, layers: list[Attention]) -> Move:
        """Moves accepted rows within the cache of one KV cache group's target layers."""
        raise NotImplementedError

    def get_ahead(self) -> None:
        """Let the host get ahead of a device, so that steps are timed that never wait for it."""

    def warm_up_kernels(self) -> None:
        """Compile what the steps run; the model is loaded, the KV cache is not there."""
        raise NotImplementedError

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        plan = tree_plan(vllm_config)
        if plan is None:
            raise RuntimeError("the tree runner was chosen for an engine without dyntree options")
        self.clock = self.make_clock()
        self.send = self.make_send()
        vocabulary = self.model_config.get_vocab_size()
        self.trees = TreeStore(self.max_num_reqs, plan, vocabulary, device)
        self.estimate = AcceptanceEstimate(device)
        # One more, for the trees' spare slot.
        self.chained = torch.zeros(self.max_num_reqs + 1, dtype=torch.bool, device=device)
        # vLLM has no registry of speculators; the stock one of this method is dropped unused.
        self.speculator: TreeSpeculator = self.speculator_type(
            vllm_config,
            device,
            self.trees,
            self.chained,
            ChildPicker(plan, self.perturb, self.estimate),
            self._pack,
            self.clock,
        )
        self.trace: TreeTrace | None = None
        self._custom_processors = has_custom_processors(self.model_config)
        self._mask: TreeMask | None = None
        self._packed: tuple[InputBatch, torch.Tensor] | None = None
        self._plain_steps: PlainSteps | None = None
        self._record = StepRecord()
        self._report: torch.Tensor | None = None
        self._row_cost: RowCost | None = None
        self._row_cost_told = False
        self._step_times = StepTimes()
        self._movers: list[tuple[int, Move]] = []

    def _pack(self, batch: InputBatch) -> torch.Tensor:
        """The batch's requests, for verification and for drafting."""
        if self.sampler is None:
            raise RuntimeError("trees were wanted before the sampler was made")
        if self._packed is None or self._packed[0] is not batch:
            self._packed = batch, pack(batch, self.sampler.sampling_states)
        return self._packed[1]

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if self.sampler is None:
            raise RuntimeError("vLLM made no sampler for a generating model")
        wrap_seeds(self.sampler)
        self.warm_up_kernels()
        # vLLM calls it by its signature and nothing else.
        self.rejection_sampler: Any = self.verifier_type(
            self.sampler,
            self.trees,
            self.walk,
            self.perturb,
            self.clock,
            self.input_buffers,
            self._pack,
            self._settle,
            self._on_verified,
        )
        stock_prepare_attn = self.model_state.prepare_attn

        def prepare_attn(*args: Any, **kwargs: Any) -> dict[str, Any]:
            mask, self._mask = self._mask, None
            if mask is not None:
                kwargs["model_specific_attn_metadata"] = TreeAttnMetadata(mask)
            metadata: dict[str, Any] = stock_prepare_attn(*args, **kwargs)
            self.clock.start("target")
            return metadata

        self.model_state.prepare_attn = prepare_attn  # type: ignore[method-assign]

    def initialize_kv_cache(
        self, kv_cache_config: KVCacheConfig, is_profiling: bool = False, *args: Any, **kw: Any
    ) -> None:
        super().initialize_kv_cache(kv_cache_config, is_profiling, *args, **kw)
        if is_profiling:
            return  # This cache is thrown away; movers would keep it.
        layers = get_layers_from_vllm_config(self.vllm_config, Attention)
        drafts = self.speculator.draft_attn_layer_names
        self._movers = []
        for index, group in enumerate(self.kv_cache_config.kv_cache_groups):
            own = [layers[name] for name in group.layer_names if name not in drafts]
            if own:
                self._movers.append((index, self.mover_of(own)))

    def sample_greedily(self, requests: int) -> None:
        """Have the first slots sample greedily, whatever vLLM's rehearsals left there."""
        sampler: Any = self.sampler
        for slot in range(requests):
            sampler.add_request(slot, SamplingParams(temperature=0.0))
        sampler.apply_staged_writes()

    @torch.inference_mode()
    def sample_plain(self, hidden: torch.Tensor) -> None:
        """Sample one token of each row as a plain step does.

        vLLM's own rehearsal, ``_dummy_sampler_run``, samples a second time with every option on
        since 0.33.
        """
        model: Any = self.model
        sampler: Any = self.sampler
        rows = hidden.shape[0]
        batch = InputBatch.make_dummy(rows, rows, self.input_buffers)
        sampler(model.compute_logits(hidden), batch)

    def measure_plain_cost(self) -> None:
        """Learn what trees are compared with; call it before the first request."""
        began = time.monotonic()
        agree = get_tp_group().broadcast_object
        self._plain_steps = PlainSteps(measure(self, agree))
        if trees_are_cut(self.vllm_config):
            self.budget_by(measure_rows(self, agree))
        logger.info_once("It took %.1f s to measure what steps cost.", time.monotonic() - began)
        self._record = self._new_record()

    def budget_by(self, cost: RowCost) -> None:
        """Take what rows cost. Unless the platform knows better, the scheduler chooses by it."""
        self._row_cost = cost

    def step_ended(self, batch: InputBatch, record: StepRecord) -> None:
        """Note the most nodes that a tree of this step could have."""
        drafts = batch.num_draft_tokens_per_req
        record.node_budget = self.trees.shape.node_budget
        if self._row_cost is not None and drafts is not None:
            record.node_budget = int(drafts.max())

    def _new_record(self) -> StepRecord:
        record = StepRecord(self._plain_steps)
        record.weighs_trees = self._row_cost is not None
        if self._row_cost is not None and not self._row_cost_told:
            record.row_cost, self._row_cost_told = self._row_cost, True
            record.fewest_forwards = self.speculator.fewest_forwards
        return record

    def add_requests(self, scheduler_output: SchedulerOutput) -> None:
        super().add_requests(scheduler_output)
        # vLLM calls it in every step, whether or not a request is new.
        self.speculator.most_forwards = getattr(scheduler_output, FORWARDS, None)
        new = scheduler_output.scheduled_new_reqs
        if not new:
            return
        reasons = [chain_reason(each.sampling_params, self._custom_processors) for each in new]
        slots = async_tensor_h2d(
            [self.req_states.req_id_to_index[each.req_id] for each in new],
            device=self.device,
            dtype=torch.int64,
        )
        chained = [reason is not None for reason in reasons]
        self.trees.clear(slots)
        self.chained.index_copy_(
            0, slots, async_tensor_h2d(chained, device=self.device, dtype=torch.bool)
        )

    def prepare_attn(
        self, input_batch: InputBatch
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        found = super().prepare_attn(input_batch)
        if input_batch.num_draft_tokens:
            self._mask = self._place_nodes(input_batch)
        return found

    def _place_nodes(self, batch: InputBatch) -> TreeMask:
        """Turn the rows' linear positions into those of their nodes, and make the mask."""
        drafts = batch.num_draft_tokens_per_req
        if drafts is None:
            raise RuntimeError("vLLM scheduled drafts without saying whose they are")
        requests = slice(batch.num_reqs)
        plain = (drafts == 0) | (batch.num_scheduled_tokens[requests] != drafts + 1)
        plain |= batch.is_prefilling_np[requests]
        return TreeMask(*self.place(batch), bool(plain.any()))

    def place(self, batch: InputBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Change the batch's positions; ``ctx_lens`` and ``ancestor_bits`` as in TreeMask.

        vLLM fills a request up with drafts that has one token of its prompt left: these are no
        tree.
        """
        slot, row = batch.expanded_idx_mapping, batch.expanded_local_pos.long()
        depth = self.trees.depths[slot, (row - 1).clamp(min=0)]
        rows = batch.logits_indices
        has_tree = batch.positions[rows] - row >= self.req_states.prefill_len.gpu[slot]
        batch.positions[rows] += torch.where(has_tree & (row > 0), depth - row, 0)

        num_reqs = batch.num_reqs
        lengths = batch.query_start_loc[1 : num_reqs + 1] - batch.query_start_loc[:num_reqs]
        num_logits = torch.diff(batch.cu_num_logits)
        is_tree = (num_logits > 1) & (lengths == num_logits)
        is_tree &= has_tree[batch.cu_num_logits[:-1].long()]
        bits = torch.zeros(
            batch.num_tokens, self.trees.words, dtype=torch.int32, device=rows.device
        )
        bits[rows] = self.trees.ancestors[slot, row]
        return torch.where(is_tree, batch.seq_lens[:num_reqs] - lengths, -1), bits

    def sample(
        self,
        hidden_states: torch.Tensor,
        input_batch: InputBatch,
        grammar_output: GrammarOutput | None,
    ) -> tuple[SamplerOutput, torch.Tensor, torch.Tensor]:
        self.clock.stop()
        with self.clock("sample"):
            output = super().sample(hidden_states, input_batch, grammar_output)
        self._record.grown_by = self.speculator.grown_by
        requests = slice(input_batch.num_reqs)
        found, self._report = self._report, None
        if found is None and self.speculator.grown_by is not None:
            found = report(self.trees, input_batch.idx_mapping)
        self._record.sampled(
            input_batch.is_prefilling_np[requests],
            input_batch.num_computed_tokens_np[requests],
            input_batch.num_tokens,
            found,
            self.trees.plan,
        )
        # Before drafting, so that the copy need not wait for it.
        self._record.send(self.send)
        return output

    def _settle(self, verification: Verification, requests: Requests) -> None:
        """Move the accepted paths, and learn."""
        with self.clock("move"):
            for group, move in self._movers:
                slots = self.block_tables.slot_mappings[group]
                move(verification.path, verification.roots, slots)
        if self.trees.plan.calibrated:
            self.learn(
                self.estimate.regression,
                self.trees.features,
                self.trees.parents,
                verification.path,
                verification.counts,
                requests.index,
                requests.classes,
            )

    def _on_verified(
        self, verification: Verification, found: torch.Tensor, batch: InputBatch
    ) -> None:
        self.speculator.verified = verification
        self._report = found
        if self.trace is not None:
            self.trace.add(verification, batch, self.trees)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:
        state = self.execute_model_state
        output = super().sample_tokens(grammar_output)
        if state is None:
            return output
        record, self._record = self._record, self._new_record()
        record.draft_forwards = self.speculator.forwards
        record.times = self.clock.split()
        self.step_ended(state.input_batch, record)
        return CountedOutput(output, record, self._step_times)

"""vLLM's V2 model runner with trees: vLLM's hooks, in the order in which a step calls them.

The hooks that a pipeline's earlier stages have, too, are in `stage`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu.states import RequestState
from vllm.v1.worker.utils import clear_layer_kv_caches

from dyntree_plugin.admission.request_limits import wrap_seeds
from dyntree_plugin.engine.agreement import agreement_of
from dyntree_plugin.engine.compose import Composer
from dyntree_plugin.engine.configuration import tree_sizes, uses_adaptive_budget
from dyntree_plugin.engine.drafts.base import TreeProposals
from dyntree_plugin.engine.drafts.look_up import TextLookUp
from dyntree_plugin.engine.drafts.speculators import speculator_for
from dyntree_plugin.engine.drawn.store import DrawStore
from dyntree_plugin.engine.fallback import chain_reason
from dyntree_plugin.engine.grammar.drafted import DraftGrammars, InTurn
from dyntree_plugin.engine.grammar.drafts import RecentDrafts
from dyntree_plugin.engine.grammar.tries import GrammarTries
from dyntree_plugin.engine.sampling.parameters import TreeParameters
from dyntree_plugin.engine.sampling.processors import (
    ProcessorsOnTrees,
    custom_processors,
    read_paths,
)
from dyntree_plugin.engine.sampling.prompts import leave_out_drafts
from dyntree_plugin.engine.sampling.ranking import TargetRanking
from dyntree_plugin.engine.stage import TreeStage
from dyntree_plugin.engine.start.kept_costs import costs_at_start
from dyntree_plugin.engine.step.clock import StageTimes
from dyntree_plugin.engine.step.count import report
from dyntree_plugin.engine.step.draft import Ranking
from dyntree_plugin.engine.step.ops import Graphs, NoGraphs
from dyntree_plugin.engine.step.requests import Packer
from dyntree_plugin.engine.step.trees import TreeStore
from dyntree_plugin.engine.step.verify import TreeVerifier
from dyntree_plugin.engine.telemetry.step_record import CountedOutput, StepRecord, StepTimes
from dyntree_plugin.tree.budget.plain_steps import PlainSteps
from dyntree_plugin.tree.budget.row_cost import RowCost, StepSeconds
from dyntree_plugin.tree.plan import TreePlan
from dyntree_plugin.tree.source import TrieSource
from dyntree_plugin.tree.value import AcceptanceEstimate

Verify = Callable[[torch.Tensor, InputBatch, torch.Tensor | None], SamplerOutput]

# vLLM shows only what is logged below the name of its package.
logger = init_logger("vllm.dyntree")


class TreeRunnerMixin(TreeStage):
    """Runs the stages of a step from vLLM's hooks; the rest is the stock runner's.

    In a pipeline it is the last stage, which drafts and verifies.
    """

    trees: TreeStore

    def make_graphs(self) -> Graphs:
        """Make what replays stages from graphs."""
        return NoGraphs()

    def make_grammars(self) -> DraftGrammars | None:
        """Make what keeps drafts within grammars; None where the host knows no texts in a step."""
        return None

    def lift_limits(self, sampler: Sampler) -> None:
        """Let the states of the ``sampler`` hold longer lists than vLLM's kernels support."""

    def queue_delay(self) -> None:
        """Delay the device, so that the host runs ahead and timed steps never wait for it."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        plan = self.plan
        self.graphs = self.make_graphs()
        vocabulary = self.model_config.get_vocab_size()
        self.trees = TreeStore(self.max_num_reqs, plan, vocabulary, device)
        self.estimate = AcceptanceEstimate(device)
        self._chains = chain_reason(self.model_config, plan.shape) is not None
        # One more, for the trees' spare slot.
        self.chained = torch.full((self.max_num_reqs + 1,), self._chains, device=device)
        self.grammars = self.make_grammars()
        draws = None
        if plan.reads_distributions:
            draws = DrawStore(self.max_num_reqs, plan, vocabulary, device, self.ops.kept_tokens)
        self.compose = Composer(
            trees=self.trees,
            draws=draws,
            chained=self.chained,
            estimate=self.estimate,
            ops=self.ops,
            graphs=self.graphs,
            tries=self._tries(plan),
            ranking=self._ranking,
        )
        speculator = speculator_for(plan, vllm_config.speculative_config)
        self.speculator: TreeProposals = speculator(vllm_config, device, self, self.compose)
        self.recent_drafts = RecentDrafts(self.pipeline_stages, device)
        self._step_times = StepTimes()
        self._plain_steps: PlainSteps | None = None
        self._row_cost: RowCost | None = None
        self._row_cost_sent = False
        self._record = StepRecord()
        self._pack = Packer()

    def update_max_model_len(self, max_model_len: int) -> None:
        """Follow the context that vLLM fits to the memory, before there is a KV cache."""
        super().update_max_model_len(max_model_len)
        self.speculator.update_max_model_len(max_model_len)

    def _tries(self, plan: TreePlan) -> TrieSource | None:
        """Make the look-up in the requests' texts, if the plan has one."""
        if not plan.shape.grafts:
            return None
        if plan.has_draft:  # Without a draft model vLLM places the texts for look-ups itself.
            self.place_texts(self.req_states)
        shape = plan.shape
        found = TextLookUp(self.req_states, self.ops.look_up, shape.grafts, shape.max_depth)
        return (
            found if self.grammars is None else GrammarTries(found, self.grammars, shape.max_depth)
        )

    def place_texts(self, states: RequestState) -> None:
        """Place the requests' texts where look-up can read them fast; there are no requests yet."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if self.sampler is None:
            raise RuntimeError("vLLM made no sampler for a generating model")
        wrap_seeds(self.sampler)
        leave_out_drafts(self.prompt_logprobs_worker)
        processors = self._read_paths(self.sampler)
        self.verifier = TreeVerifier(
            self.sampler,
            self.trees,
            self.estimate,
            self.ops,
            self.graphs,
            walk=self.compose.walk(self.input_buffers),
            buffers=self.input_buffers,
            keepers=lambda: self.keepers,
            copies=processors.copies,
        )
        # vLLM calls it by its signature and nothing else.
        self.rejection_sampler: Any = RejectionSampler(self.verify)

    def _read_paths(self, sampler: Sampler) -> ProcessorsOnTrees:
        """Have sampling parameters on the rows of trees read the rows' paths."""
        kernels = self.ops.paths
        self.parameters = TreeParameters(sampler, kernels)
        custom = custom_processors(sampler)
        self.lift_limits(sampler)
        processors = ProcessorsOnTrees(
            sampler,
            self.parameters,
            custom,
            self.trees,
            kernels.paths_of,
            unrolls=not self._chains,
        )
        read_paths(sampler, processors)
        return processors

    def _ranking(self) -> Ranking:
        """Let drafting know the requests' parameters; the model is loaded."""
        states, lengths = self._sampling_states(), self.req_states.total_len.gpu
        rows = self.plan.shape.block + max(self.plan.growing.widths, default=1)
        if self.device.type == "cpu":  # It has the memory that the user leaves it.
            rows = 0
        found = TargetRanking(self.parameters, states, lengths, self.vocab_size, rows)
        return found if self.grammars is None else InTurn(self.grammars, found)

    def _sampling_states(self) -> SamplingStates:
        if self.sampler is None:
            raise RuntimeError("trees were asked for before the sampler was made")
        return self.sampler.sampling_states

    def packed(self, batch: InputBatch) -> torch.Tensor:
        """Return the requests of the step on the host, as `Packer` describes them."""
        if self.step.packed is None:
            longest = self.req_states.max_seq_len
            self.step.packed = self._pack(batch, self._sampling_states(), longest)
        return self.step.packed

    def verify(
        self, logits: torch.Tensor, batch: InputBatch, invalid_drafts: torch.Tensor | None
    ) -> SamplerOutput:
        """After the target's forward: accept a path of each tree, and make it permanent."""
        packed = self.packed(batch)
        output, self.step.verified, self.step.learning = self.verifier.run(
            packed, logits, batch, invalid_drafts
        )
        return output

    def drawn(self, slots: list[int]) -> np.ndarray | None:
        """Return which requests have drawn chains or trees, bool [R]; None if none can have one."""
        return self._sampling_states().temperature.np[slots] > 0 if self.trees.plan.draws else None

    def shutdown(self) -> None:
        """Release the KV cache of the further drafts, too, which vLLM does not know."""
        for draft in getattr(self.speculator, "further", ()):
            clear_layer_kv_caches(draft.model.modules())
        if self.grammars is not None:
            self.grammars.close()
        super().shutdown()

    def measure_costs(self) -> None:
        """Find out what steps cost, before the first request."""
        adaptive = uses_adaptive_budget(self.vllm_config)
        with self.measured_adapters():
            agree = agreement_of(self.vllm_config)
            costs = costs_at_start(self, self.vllm_config, agree, adaptive)
        self._plain_steps = PlainSteps(costs)
        if adaptive:
            measured = costs.rows, costs.with_head, costs.most_rows, costs.of_position
            self.take_row_cost(RowCost(*measured))
        self._record = self._new_record()

    def forget_rehearsal(self) -> None:
        super().forget_rehearsal()
        self.estimate.forget()

    def take_row_cost(self, cost: RowCost) -> None:
        """Give the measured costs to what chooses the budget: here, to the scheduler."""
        self._row_cost = cost

    def weights_replaced(self, model: str) -> None:
        """Start the values of nodes anew, and have the scheduler forget with the next step."""
        self.estimate.forget()
        self._record.weights_replaced(model)

    def add_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Begin a step, and forget what was known of the slots that new requests take."""
        super().add_requests(scheduler_output)
        new = scheduler_output.scheduled_new_reqs
        if self.grammars is not None:
            self.grammars.begin_step(new)
        if not new:
            return
        slots = async_tensor_h2d(
            [self.req_states.req_id_to_index[each.req_id] for each in new],
            device=self.device,
            dtype=torch.int64,
        )
        self.trees.clear(slots)

    def sample(
        self,
        hidden_states: torch.Tensor,
        input_batch: InputBatch,
        grammar_output: GrammarOutput | None,
    ) -> tuple[SamplerOutput, torch.Tensor, torch.Tensor]:
        """Verify the trees, by way of `RejectionSampler`; send the counts to the host."""
        self.clock.next("sample")
        output = super().sample(hidden_states, input_batch, grammar_output)
        self._count(input_batch)
        # Before drafting, so that the copy need not wait for it.
        self._record.send(self.ops.send)
        return output

    def _count(self, batch: InputBatch) -> None:
        walked, drafted = self.step.verified, self.previous.drafted
        grown = drafted.growth_forwards
        if self.trace is not None and walked is not None:
            self.trace.add(walked, batch, self.trees)
        found = None if walked is None else walked.report
        if found is None and grown is not None:
            found = report(self.trees, batch.idx_mapping)
        ended_early = drafted.ended_early
        self._record.sampled(batch, found, self.trees.plan, walked is not None, grown, ended_early)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:
        """Sample, then draft by way of the speculator; attach the step's counts to the output."""
        state = self.execute_model_state
        self.draft_tokens_handler = self.recent_drafts.next_step()
        output = super().sample_tokens(grammar_output)
        if state is None:
            return output
        batch = state.input_batch
        if self.relay is not None:
            walked = self.step.verified
            self.relay.send(batch, None if walked is None else walked.path, self.trees)
        # With structured output vLLM sends the drafts to the scheduler, and it needs trees.
        outline = batch.has_structured_output_reqs
        if outline:
            parents = self.trees.parents_of(batch.idx_mapping)
            self.recent_drafts.add_parents(self.ops.send(parents))
        record, self._record = self._record, self._new_record()
        times = self.clock.split()
        record.ended(self.step.drafted.forwards, times, self.step_ended(batch, times))
        return CountedOutput(output, record, self._step_times)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Hand the drafts of the last steps to the scheduler."""
        return self.recent_drafts.take()

    def step_ended(self, batch: InputBatch, times: StageTimes) -> StepSeconds | None:
        """Learn from a step; ``times`` may not be known yet.

        Return its seconds; None if nothing was expected of it.
        """
        return None

    def _new_record(self) -> StepRecord:
        """Make the next step's record; the first one carries the row costs to the scheduler."""
        weighed = () if self._row_cost is None else tree_sizes(self.vllm_config)
        record = StepRecord(self._plain_steps, weighed)
        if self._row_cost is not None and not self._row_cost_sent:
            self._row_cost_sent = True
            record.introduce(self._row_cost, self.graphs.fewest_forwards)
        return record


class RejectionSampler:
    """Stands in for vLLM's rejection sampler, with its signature."""

    # vLLM's rehearsal of its kernels asks for it.
    enable_adaptive_verification = False

    def __init__(self, verify: Verify) -> None:
        self._verify = verify

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> SamplerOutput:
        return self._verify(logits, input_batch, invalid_drafts)

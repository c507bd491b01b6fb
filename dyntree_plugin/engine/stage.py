"""What every stage of a pipeline does with trees; an engine without a pipeline has one stage."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.input_batch import InputBatch

from dyntree_plugin.engine.adapters import AdapterRows
from dyntree_plugin.engine.attention.metadata import TreeMask, WithTreeMask
from dyntree_plugin.engine.budget.by_schedule import FORWARDS
from dyntree_plugin.engine.configuration import tree_plan
from dyntree_plugin.engine.layer_kinds import Keeper, LayerGroup, keepers
from dyntree_plugin.engine.pipeline.relay import TreeRelay
from dyntree_plugin.engine.states.committer import OneStatePerRequest
from dyntree_plugin.engine.step.ops import TreeOps
from dyntree_plugin.engine.step.place import WithTreePositions, place_nodes
from dyntree_plugin.engine.step.records import Step
from dyntree_plugin.engine.step.trees import PlacedTrees
from dyntree_plugin.engine.telemetry.trace import TreeTrace


class TreeStage(AdapterRows):
    """Places nodes before the target's forward, and knows what keeps accepted paths.

    vLLM lays a request's drafts out in consecutive rows and cache slots. Node ``j`` takes row and
    slot ``root + 1 + j``, but the position ``root + depth``: for its RoPE, and for the sampler's
    noise.
    """

    trees: PlacedTrees
    lone_roots = False
    """As in `place_nodes`."""

    def make_ops(self) -> TreeOps:
        """Make what the platform brings to a step."""
        raise NotImplementedError

    def forget_rehearsal(self) -> None:
        """Forget the steps that ran before the first request."""
        self._forget_steps()

    def weights_replaced(self, model: str) -> None:
        """Forget what was learned of the weights of ``model``: the target's or the draft's."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        with _no_speculator():
            super().__init__(vllm_config, device)
        plan = tree_plan(vllm_config)
        if plan is None:
            raise RuntimeError("the tree runner was chosen for an engine without dyntree options")
        self.plan = plan
        self._uses_mrope = vllm_config.model_config.uses_mrope
        self.ops = self.make_ops()
        self.clock = self.ops.clock
        self.trace: TreeTrace | None = None
        self.pipeline_stages = get_pp_group().world_size
        self.relay: TreeRelay | None = None
        if self.pp_handler is not None:
            self.relay = TreeRelay(self.pp_handler, plan.shape, self.pipeline_stages)
        self.keepers: list[Keeper] = []
        self._forget_steps()

    def _forget_steps(self) -> None:
        self.step = Step()
        self._earlier = deque([Step()], maxlen=self.pipeline_stages)

    @property
    def previous(self) -> Step:
        """The step that drafted the trees of this one: the last one of the same requests."""
        return self._earlier[0]

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        # vLLM offers no hook by which a runner adds to the metadata of the target's attention.
        self.model_state.prepare_attn = WithTreeMask(  # type: ignore[method-assign]
            self.model_state.prepare_attn, self._take_mask, self.clock, self._draft_layers
        )
        if self.vllm_config.cache_config.mamba_cache_mode == "align":
            # vLLM offers no other hook between the two that copy states between blocks.
            self.model_state.recoverssm = OneStatePerRequest()  # type: ignore[attr-defined]
        if self._uses_mrope:
            self.model_state.prepare_inputs = WithTreePositions(  # type: ignore[method-assign]
                self.model_state.prepare_inputs, self._take_shift
            )

    @property
    def _draft_layers(self) -> frozenset[str]:
        """Names of the attention layers of a loaded draft; none without one."""
        return frozenset(getattr(self.speculator, "draft_attn_layer_names", ()))

    def initialize_kv_cache(
        self, kv_cache_config: KVCacheConfig, is_profiling: bool = False, *args: Any, **kw: Any
    ) -> None:
        super().initialize_kv_cache(kv_cache_config, is_profiling, *args, **kw)
        if is_profiling:
            return  # This cache is thrown away; keepers would hold it.
        count = len(self.kv_cache_config.kv_cache_groups)
        self.keepers = keepers(self.ops.kinds, map(self._target_layers, range(count)))

    def _target_layers(self, index: int) -> LayerGroup:
        """Return the target's layers in a KV cache group."""
        layers = self.compilation_config.static_forward_context
        names = self.kv_cache_config.kv_cache_groups[index].layer_names
        return LayerGroup(
            {name: layers[name] for name in names if name not in self._draft_layers},
            self.block_tables.slot_mappings[index],
            self.block_tables.input_block_tables[index],
            {
                name: group.get_metadata_builder()
                for group in self.attn_groups[index]
                for name in group.layer_names
            },
        )

    def add_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Begin a step; vLLM calls it in every one, whether or not a request is new."""
        super().add_requests(scheduler_output)
        self._earlier.append(self.step)
        self.step = Step(getattr(scheduler_output, FORWARDS, None))

    def prepare_attn(
        self, input_batch: InputBatch
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Place the nodes; vLLM then prepares the attention metadata and runs the target."""
        found = super().prepare_attn(input_batch)
        self.place(input_batch)
        return found

    def place(self, batch: InputBatch) -> None:
        """Give rows of nodes their positions, and the batch a mask."""
        if batch.num_draft_tokens:
            self.clock.start("place")
            of_rows = batch.positions.clone() if self._uses_mrope else None
            of_engine = {"same_bits": self.plan.same_bits, "lone_roots": self.lone_roots}
            self.step.mask = place_nodes(batch, self.place_rows, **of_engine)
            self.step.shift = None if of_rows is None else batch.positions - of_rows

    def place_rows(
        self, batch: InputBatch, *, all_trees: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Do what `TreeOps.place` does for the trees of this stage."""
        prefill_len = self.req_states.prefill_len.gpu
        return self.ops.place(batch, self.trees, prefill_len, all_trees=all_trees)

    def _take_mask(self) -> TreeMask | None:
        """Give the mask to the target's attention, once."""
        mask, self.step.mask = self.step.mask, None
        return mask

    def _take_shift(self) -> torch.Tensor | None:
        """Give what `WithTreePositions` adds to positions, once."""
        shift, self.step.shift = self.step.shift, None
        return shift


@contextmanager
def _no_speculator() -> Iterator[None]:
    """Keep vLLM's runner from making a stock speculator.

    vLLM has no registry of speculators, and its n-gram speculator refuses a CPU.
    """
    module: Any = model_runner
    stock = module.init_speculator
    module.init_speculator = lambda *args: None
    try:
        yield
    finally:
        module.init_speculator = stock

"""The runner on CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_pp_group, graph_capture
from vllm.logger import init_logger
from vllm.v1.worker.gpu.attn_utils import get_varlen_cudagraph_unsupported_backend
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.states import RequestState

from dyntree_plugin.engine.attention.buffers import shared
from dyntree_plugin.engine.configuration import tree_sizes, uses_adaptive_budget
from dyntree_plugin.engine.cuda.capture import free_memory, recorder
from dyntree_plugin.engine.cuda.captured import MOST_REQUESTS, CapturedDrafting, CapturedStages
from dyntree_plugin.engine.cuda.graph_memory import GraphMemory
from dyntree_plugin.engine.cuda.graphs import Record
from dyntree_plugin.engine.cuda.ops import CUDAOps
from dyntree_plugin.engine.cuda.target_graphs import (
    offer_larger,
    rows_of_largest,
    thin_out,
    tree_rows,
)
from dyntree_plugin.engine.cuda.transfer import StreamSend
from dyntree_plugin.engine.drafts.look_up import MOST_TEXT_BYTES, move_texts_to_device
from dyntree_plugin.engine.earlier_stage import EarlierStage
from dyntree_plugin.engine.fallback import MAX_CHUNK_BYTES
from dyntree_plugin.engine.runner import TreeRunnerMixin
from dyntree_plugin.engine.stage import TreeStage
from dyntree_plugin.engine.step.growth_stages import DraftStages
from dyntree_plugin.engine.step.ops import TreeOps

logger = init_logger("vllm.dyntree")

HEAD_START_CYCLES = 40_000_000
"""20 ms at 2 GHz: about what launching an eager step of a large model takes."""


class GPUStage(TreeStage):
    """What CUDA adds to every stage of a pipeline."""

    ops: CUDAOps
    _tree_rows: tuple[int, ...] = ()
    """Rows of a request in the target's graphs that serve batches of different trees."""

    def make_ops(self) -> TreeOps:
        # The main stream is the one that is current when it is first asked for.
        return CUDAOps(StreamSend(lambda: self.main_stream, self.output_copy_stream))

    def warm_up_rare_kernels(self) -> None:
        """Compile what vLLM's rehearsals of steps leave out; needs the KV cache.

        Here it is the target's attention for batches of other sizes.
        """
        layers = self.compilation_config.static_forward_context
        for index, groups in enumerate(self.attn_groups):
            table = self.block_tables.input_block_tables[index]
            for group in groups:
                kv_cache = layers[group.layer_names[0]].kv_cache
                builder: Any = group.get_metadata_builder(0)
                # A backend may divide blocks of the cache, as FLASHINFER those of hybrid models.
                blocks = group.map_to_kernel_block_table(table)
                builder.warm_up(kv_cache, self.dtype, blocks)

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(*args, **kwargs)
        thin_out(self.cudagraph_manager)
        offer_larger(self.cudagraph_manager)
        every = [group for groups in self.attn_groups for group in groups]
        of_target = {name for group in every for name in group.layer_names} - self._draft_layers
        given = self.vllm_config, self.decode_query_len, of_target
        self.lone_roots = not get_varlen_cudagraph_unsupported_backend(self.attn_groups, *given)
        # Data-parallel ranks must take graphs of the same size, and know each other's rows alone.
        any_mix = self.lone_roots and self.dp_size == 1
        self._tree_rows = tree_rows(self.cudagraph_manager) if any_mix else ()
        builders: list[Any] = [group.get_metadata_builder(0) for group in every]
        # Sparse latent attention needs no mask; its indexer has one.
        self.ops.masks = shared(each for each in builders if hasattr(each, "masks"))

    def gather_batch_req_state(self, *args: Any, **kwargs: Any) -> tuple[Any, int | None]:
        """Give a batch of decodes whose trees differ in size, or have a size without graphs, a
        graph of larger trees."""
        state, rows = super().gather_batch_req_state(*args, **kwargs)
        # Batches of one row each have graphs of their own, and no masks.
        if state is not None and not state.has_prefill and rows not in (1, *self._tree_rows):
            rows = rows_of_largest(state.num_scheduled_tokens, self._tree_rows) or rows
        return state, rows


class EarlierGPUStage(GPUStage, EarlierStage):
    """A stage of a pipeline before the last."""


class TreeGPUModelRunner(GPUStage, TreeRunnerMixin):
    """Adds graphs of the stages, and what CUDA must know about memory and streams."""

    graphs: CapturedStages

    def make_graphs(self) -> CapturedStages:
        return CapturedStages(self._captured_drafting, self._recording, self._states_in_graphs)

    def _captured_drafting(self, stages: DraftStages) -> CapturedDrafting:
        most = min(self.max_num_reqs, MOST_REQUESTS)
        if most < self.max_num_reqs:
            logger.info_once("Batches of more than %d requests draft without CUDA graphs.", most)
        shape = self.trees.shape
        sizes, fewest = [shape.node_budget], len(stages.widths)
        if uses_adaptive_budget(self.vllm_config):
            sizes, fewest = [*tree_sizes(self.vllm_config)], 0
        numbers = sorted({1 + min(size, shape.max_depth) for size in sizes})
        of_trees = self.trees.spare, self.trees.vocabulary
        return CapturedDrafting(stages, numbers, most, *of_trees, fewest, shape.node_budget)

    def _states_in_graphs(self) -> tuple[torch.Tensor, ...]:
        """Return where the target's graphs leave the hidden states that a draft reads."""
        manager: Any = self.cudagraph_manager
        if manager.aux_hidden_states or not self.trees.shape.head:
            return tuple(manager.aux_hidden_states)
        return () if manager.hidden_states is None else (manager.hidden_states,)

    @contextmanager
    def _recording(self) -> Iterator[Record]:
        with graph_capture(device=self.device):
            yield recorder(self.vllm_config)

    def place_texts(self, states: RequestState) -> None:
        if not move_texts_to_device(states):
            logger.warning_once(
                "Look-up reads texts from the host's memory, which is slow: those of max_num_seqs="
                "%d requests with max_model_len=%d tokens take more than %d MiB. Lower one of the "
                "two, or set dyntree.lookup to off.",
                *(self.max_num_reqs, self.max_model_len, MOST_TEXT_BYTES >> 20),
            )

    def queue_delay(self) -> None:
        # Plain steps of engines without trees are graphs, which wait for no launch. Ours here are
        # not captured whole, and their launches would be counted as cost.
        torch.cuda._sleep(HEAD_START_CYCLES)  # type: ignore[no-untyped-call]

    def _dummy_sampler_run(self, hidden_states: torch.Tensor) -> None:
        """Profile memory with the rows of trees, too; vLLM's profile has a row per request."""
        requests, node_budget = len(hidden_states), self.trees.shape.node_budget
        rows = min(self.max_num_tokens, requests * (1 + node_budget))
        at = torch.arange(rows, device=hidden_states.device) % requests
        model: Any = self.model
        logits = model.compute_logits(hidden_states[at])
        copies = self.verifier.copies
        copied = min(rows, MAX_CHUNK_BYTES // (4 * copies * logits.shape[1]))
        kept = [logits, logits[:copied].float()]
        if self.verifier.keeps_logits:  # The processed logits of all chunks are kept, and joined.
            chunks = [logits.float()]
            kept += chunks if copied == rows else [*chunks, chunks[0].clone()]
        if copies > 1:  # Custom logits processors get chains, of which the last rows are kept.
            kept += [kept[1].repeat(copies, 1), kept[1].clone()]
        super()._dummy_sampler_run(hidden_states)
        del kept

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        self.graphs.drop_of_cache()
        super().initialize_kv_cache(*args, **kwargs)

    @torch.inference_mode()
    def capture_model(self, *, profile_only: bool = False) -> int:
        """Capture all graphs; return the bytes that they take.

        With ``profile_only``, few are captured and none is replayed, and the bytes are an estimate.
        """
        if profile_only:
            memory = GraphMemory(free_memory)
            with self.graphs.profiled(memory):
                return int(super().capture_model(profile_only=True)) + memory.left_out
        taken: int = super().capture_model()
        if self.graphs.has_drafting:
            most = min(self.max_num_reqs, MOST_REQUESTS)
            self.graphs.capture_verification(self.verifier, most)
            if self.ops.masks is not None:
                masks = self.ops.masks
                self.graphs.capture_placing(self.trees, self.input_buffers, masks, most)
        return taken

    def place_rows(
        self, batch: InputBatch, *, all_trees: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.graphs.placing(self.packed(batch), batch.num_tokens) if all_trees else None
        return super().place_rows(batch, all_trees=all_trees) if found is None else found

    def warm_up_rare_kernels(self) -> None:
        super().warm_up_rare_kernels()
        self.verifier.rehearse()

    def sample(self, *args: Any) -> tuple[SamplerOutput, torch.Tensor, torch.Tensor]:
        # Verification writes where its last output may still be copied from, or sent from to the
        # earlier stages of a pipeline.
        self.main_stream.wait_stream(self.output_copy_stream)
        if self.pp_handler is not None:
            self.main_stream.wait_stream(self.pp_handler.broadcast_stream)
        return super().sample(*args)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if self.sampler is None:
            raise RuntimeError("vLLM made no sampler for a generating model")
        # FlashInfer's sampler draws other noise, which drafting could not be coupled with.
        self.sampler.use_flashinfer = False


def make_runner(
    vllm_config: VllmConfig, device: torch.device
) -> TreeGPUModelRunner | EarlierGPUStage:
    """Make the runner of this process's stage of the pipeline."""
    last = get_pp_group().is_last_rank
    return (TreeGPUModelRunner if last else EarlierGPUStage)(vllm_config, device)

"""The runner on CUDA."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.parallel_state import graph_capture
from vllm.model_executor.layers.attention import Attention
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from dyntree_kernels.cuda.gumbel import perturbed_logits
from dyntree_kernels.cuda.kv_move import KVMover
from dyntree_kernels.cuda.learn import learn
from dyntree_kernels.cuda.place import place
from dyntree_kernels.cuda.walk import walk
from dyntree_plugin.engine.cpu.kv import Move
from dyntree_plugin.engine.cuda.capture import recorder
from dyntree_plugin.engine.cuda.clock import EventClock
from dyntree_plugin.engine.cuda.draft_rows import GPUTreeSpeculator
from dyntree_plugin.engine.cuda.speculator import MOST_REQUESTS
from dyntree_plugin.engine.cuda.target_graphs import offer_larger, thin_out
from dyntree_plugin.engine.cuda.transfer import StreamSend
from dyntree_plugin.engine.cuda.verification import GraphedTreeVerifier
from dyntree_plugin.engine.runner import TreeRunnerMixin
from dyntree_plugin.engine.step.clock import Clock
from dyntree_plugin.engine.step.transfer import Send
from dyntree_plugin.engine.step.verify import MAX_CHUNK_BYTES

HEAD_START_CYCLES = 40_000_000
"""20 ms at 2 GHz: about what launching an eager step of a large model takes."""


class TreeGPUModelRunner(TreeRunnerMixin):
    speculator_type = GPUTreeSpeculator
    speculator: GPUTreeSpeculator
    verifier_type = GraphedTreeVerifier
    perturb = staticmethod(perturbed_logits)
    walk = staticmethod(walk)
    learn = staticmethod(learn)

    def make_clock(self) -> Clock:
        return EventClock()

    def make_send(self) -> Send:
        # The main stream is the one that is current when it is first asked for.
        return StreamSend(lambda: self.main_stream, self.output_copy_stream)

    def mover_of(self, layers: list[Attention]) -> Move:
        return KVMover([layer.kv_cache for layer in layers])

    def place(self, batch: InputBatch) -> tuple[torch.Tensor, torch.Tensor]:
        requests = batch.num_reqs
        return place(
            batch.positions,
            batch.idx_mapping,
            batch.cu_num_logits,
            batch.query_start_loc[: requests + 1],
            batch.seq_lens[:requests],
            self.req_states.prefill_len.gpu,
            self.trees.depths,
            self.trees.ancestors,
            batch.num_tokens,
        )

    def get_ahead(self) -> None:
        # Plain steps of engines without trees are graphs, which wait for no launch; ours here are
        # not captured whole, and their launches would be counted as cost.
        torch.cuda._sleep(HEAD_START_CYCLES)  # type: ignore[no-untyped-call]

    def warm_up_kernels(self) -> None:
        """Triton's compile when they are first run, for which vLLM rehearses steps."""

    def warm_up_attention(self) -> None:
        """Compile the target's attention for batches that no rehearsal had; needs the KV cache."""
        layers = self.compilation_config.static_forward_context
        for index, groups in enumerate(self.attn_groups):
            table = self.block_tables.input_block_tables[index]
            for group in groups:
                kv_cache = layers[group.layer_names[0]].kv_cache
                builder: Any = group.get_metadata_builder(0)
                builder.warm_up(kv_cache, self.dtype, table)

    def _dummy_sampler_run(self, hidden_states: torch.Tensor) -> None:
        """vLLM's profile of memory, which has a row for each request: with those of trees too."""
        requests, node_budget = len(hidden_states), self.trees.shape.node_budget
        rows = min(self.max_num_tokens, requests * (1 + node_budget))
        at = torch.arange(rows, device=hidden_states.device) % requests
        model: Any = self.model
        logits = model.compute_logits(hidden_states[at])
        copied = min(rows, MAX_CHUNK_BYTES // (4 * logits.shape[1]))
        kept = logits, logits[:copied].float()
        super()._dummy_sampler_run(hidden_states)
        del kept

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        self.rejection_sampler.graphs = None  # They move rows in the cache that was there.
        super().initialize_kv_cache(*args, **kwargs)
        thin_out(self.cudagraph_manager)
        offer_larger(self.cudagraph_manager)

    @torch.inference_mode()
    def capture_model(self, *, profile_only: bool = False) -> int:
        taken: int = super().capture_model(profile_only=profile_only)
        if self.speculator.has_graphs:
            with graph_capture(device=self.device):
                most = min(self.max_num_reqs, MOST_REQUESTS)
                self.rejection_sampler.capture(recorder(self.vllm_config), most)
        return taken

    def sample(self, *args: Any) -> tuple[SamplerOutput, torch.Tensor, torch.Tensor]:
        # Verification writes where its last output may still be copied from.
        self.main_stream.wait_stream(self.output_copy_stream)
        return super().sample(*args)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if self.sampler is None:
            raise RuntimeError("vLLM made no sampler for a generating model")
        # FlashInfer's sampler draws noise of its own, which drafting could not be coupled with.
        self.sampler.use_flashinfer = False

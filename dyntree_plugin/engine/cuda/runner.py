"""The runner on CUDA."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.parallel_state import graph_capture
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from dyntree_plugin.engine.cuda.capture import recorder
from dyntree_plugin.engine.cuda.captured import MOST_REQUESTS, CapturedStages
from dyntree_plugin.engine.cuda.ops import CUDAOps
from dyntree_plugin.engine.cuda.speculator import CUDATreeSpeculator
from dyntree_plugin.engine.cuda.target_graphs import offer_larger, thin_out
from dyntree_plugin.engine.cuda.transfer import StreamSend
from dyntree_plugin.engine.runner import TreeRunnerMixin
from dyntree_plugin.engine.step.ops import TreeOps
from dyntree_plugin.engine.step.verify import MAX_CHUNK_BYTES

HEAD_START_CYCLES = 40_000_000
"""20 ms at 2 GHz: about what launching an eager step of a large model takes."""


class TreeGPUModelRunner(TreeRunnerMixin):
    """Adds graphs of the stages, and what CUDA must know about memory and streams."""

    speculator_type = CUDATreeSpeculator
    graphs: CapturedStages

    def make_ops(self) -> TreeOps:
        # The main stream is the one that is current when it is first asked for.
        return CUDAOps(StreamSend(lambda: self.main_stream, self.output_copy_stream))

    def make_graphs(self) -> CapturedStages:
        return CapturedStages()

    def queue_delay(self) -> None:
        # Plain steps of engines without trees are graphs, which wait for no launch. Ours here are
        # not captured whole, and their launches would be counted as cost.
        torch.cuda._sleep(HEAD_START_CYCLES)  # type: ignore[no-untyped-call]

    def warm_up_kernels(self) -> None:
        """Do nothing: Triton's kernels compile when vLLM rehearses steps."""

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
        """Profile memory with the rows of trees, too; vLLM's profile has a row per request."""
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
        self.graphs.drop_verification()
        super().initialize_kv_cache(*args, **kwargs)
        thin_out(self.cudagraph_manager)
        offer_larger(self.cudagraph_manager)

    @torch.inference_mode()
    def capture_model(self, *, profile_only: bool = False) -> int:
        taken: int = super().capture_model(profile_only=profile_only)
        if self.graphs.has_drafting:
            with graph_capture(device=self.device):
                most = min(self.max_num_reqs, MOST_REQUESTS)
                record = recorder(self.vllm_config)
                self.graphs.capture_verification(self.verifier, most, record)
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

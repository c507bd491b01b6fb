"""The runner on CUDA."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention

from dyntree_kernels.gpu.gumbel import perturbed_logits
from dyntree_kernels.gpu.kv_move import KVMover
from dyntree_plugin.engine.gpu.clock import EventClock
from dyntree_plugin.engine.gpu.speculator import GraphedTreeSpeculator
from dyntree_plugin.engine.gpu.target_graphs import offer_larger
from dyntree_plugin.engine.gpu.transfer import StreamSend
from dyntree_plugin.engine.gpu.verifier import GPUTreeVerifier
from dyntree_plugin.engine.kv import Move
from dyntree_plugin.engine.runner import TreeRunnerMixin
from dyntree_plugin.engine.timing import Clock
from dyntree_plugin.engine.transfer import Send

HEAD_START_CYCLES = 40_000_000
"""20 ms at 2 GHz: about what launching an eager step of a large model takes."""


class TreeGPUModelRunner(TreeRunnerMixin):
    speculator_type = GraphedTreeSpeculator
    verifier_type = GPUTreeVerifier
    perturb = staticmethod(perturbed_logits)

    def make_clock(self) -> Clock:
        return EventClock()

    def make_send(self) -> Send:
        # The main stream is the one that is current when it is first asked for.
        return StreamSend(lambda: self.main_stream, self.output_copy_stream)

    def mover_of(self, layers: list[Attention]) -> Move:
        return KVMover([layer.kv_cache for layer in layers])

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

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(*args, **kwargs)
        offer_larger(self.cudagraph_manager)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if self.sampler is None:
            raise RuntimeError("vLLM made no sampler for a generating model")
        # FlashInfer's sampler draws noise of its own, which drafting could not be coupled with.
        self.sampler.use_flashinfer = False

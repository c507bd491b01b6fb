"""vLLM's FlashInfer backend with trees, apart from `cuda`, since importing it needs FlashInfer."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.flashinfer import FlashInferBackend

from dyntree_plugin.engine.attention.cuda_layers import TreeAttentionImpl, TreeMetadataBuilder
from dyntree_plugin.engine.attention.registration import with_trees


class FlashInferBuilder(TreeMetadataBuilder):
    """Precedes vLLM's builder of metadata.

    It leaves to vLLM the prompts, and batches of one row per request if vLLM has a kernel that
    reads their lengths on the device (XQA, or TensorRT-LLM's).

    With drafts in flight the host knows bounds of the lengths. vLLM's other kernels are planned on
    the host, where vLLM would wait for the lengths. The bounds of prompts are exact; what has no
    more rows than a tree goes to the kernel of trees.
    """

    num_qo_heads: int
    model_config: Any
    use_trtllm_decode_attention: bool

    def __init__(
        self, spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(spec, layer_names, vllm_config, device)
        if self.masks is None:
            return
        # As for an engine without drafts: decodes have one row, and the host's bounds are lengths.
        self.reorder_batch_threshold = 1
        self._num_speculative_tokens = 0
        self.fewest_rows = 2 if self.use_trtllm_decode_attention else 1

    @property
    def num_heads_q(self) -> int:
        return self.num_qo_heads

    def is_left_to_stock(self, common: CommonAttentionMetadata) -> bool:
        return common.max_query_len < self.fewest_rows

    def build_stock(self, common: CommonAttentionMetadata, fast_build: bool) -> Any:
        bounds = common.seq_lens_cpu_upper_bound
        if self.masks is not None and bounds is not None:
            # With drafts in flight they may exceed the longest request, and vLLM's buffers.
            longest = self.model_config.max_model_len
            common = common.replace(seq_lens_cpu_upper_bound=bounds.clamp(max=longest))
        return super().build_stock(common, fast_build)


TreeFlashInferBackend = with_trees(
    __name__, FlashInferBackend, FlashInferBuilder, TreeAttentionImpl
)

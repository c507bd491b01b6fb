"""vLLM's builders of metadata for recurrent layers, with trees."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor

from dyntree_kernels.cpu.tree_layers import TreeForward
from dyntree_kernels.recurrence import TreeStates
from dyntree_plugin.engine.attention.metadata import TreeMask, without_first

NOT_KEPT = -1
"""In place of a slot and of a forward: the request has no path to keep."""


@dataclass
class DraftedRows:
    """Metadata of a batch whose first ``rows`` rows belong to the requests with drafts.

    ``number``: of the forward; ``on_device`` [1]: the same, at an address that stays the same.
    ``trees``: what the device's kernels read of the rows. ``rest``: vLLM's metadata of the other
    rows, as if they were the batch; None without others.
    """

    number: int
    on_device: torch.Tensor
    rows: int
    trees: Any
    rest: Any


class WithDrafts:
    """Precedes a builder of vLLM for layers with a state.

    Requests with drafts do not change their states in the forward. All others are a batch of an
    engine without speculation.
    """

    takes_tree_mask = True

    def __init__(self, spec: Any, names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(spec, names, vllm_config, device)  # type: ignore[call-arg]
        # vLLM's speculation has a state for each draft.
        self.use_spec_decode, self.num_spec_tokens = False, 0
        self.supports_update_block_table = False
        # vLLM would fill it with slots of the whole batch, of which `rest` is a part.
        vars(self).pop("mamba_aligned_state_indices", None)
        if (slots := vars(self).get("state_indices_tensor_d")) is not None:
            # With other strides in graphs, kernels would be compiled again within a request.
            self.state_indices_tensor_d = slots[:, :1].contiguous()
        self._spec, self._cache_mode = spec, vllm_config.cache_config.mamba_cache_mode
        requests = vllm_config.scheduler_config.max_num_seqs
        self._forwards = 0
        # A column is dense, as kernels read it.
        self.kept = torch.full((4, requests), NOT_KEPT, device=device).T
        """Of each request of the batch [requests, 4], the slot of the state that an accepted path
        will advance, the number of the forward, and `ends` and `end_slots` as in `Commit`."""
        layers = vllm_config.compilation_config.static_forward_context
        self._layers = [layers[name] for name in names]

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        *args: Any,
        tree_mask: TreeMask | None = None,
        **of_speculation: Any,
    ) -> Any:
        build: Any = super().build  # type: ignore[misc]
        self.kept.fill_(NOT_KEPT)
        drafted = 0 if tree_mask is None else tree_mask.drafted
        if tree_mask is None or not drafted:
            return build(common_prefix_len, common_attn_metadata)
        common = common_attn_metadata
        rows = int(common.query_start_loc_cpu[drafted])  # sync: host memory
        every = int(common.query_start_loc_cpu[common.num_reqs])  # sync: host memory
        # A batch of drafts alone may have padding after it.
        others = without_first(common, drafted, rows) if rows < every else None
        rest = others and build(common_prefix_len, others)
        self._forwards += 1
        self._place(common, drafted)
        self.kept[:, 1] = self._forwards
        self._clear(common, drafted)
        trees = self.trees_of(common, drafted, rows, tree_mask)
        return DraftedRows(self._forwards, self.kept[:1, 1], rows, trees, rest)

    def trees_of(
        self, common: CommonAttentionMetadata, drafted: int, rows: int, mask: TreeMask
    ) -> Any:
        """Return what the device's kernels read of the first ``drafted`` requests, which have
        ``rows`` rows; `kept` has their slots."""
        raise NotImplementedError

    def _place(self, common: CommonAttentionMetadata, requests: int) -> None:
        """Note the slots of the first ``requests``.

        With a prefix cache, vLLM has moved a request's state to the block of its last row. A path
        may end before that block begins, and passes the end of one block at most.
        """
        table, lengths = common.block_table_tensor[:requests], common.seq_lens[:requests]
        slots = mamba_get_block_table_tensor(table, lengths, self._spec, self._cache_mode)
        self.kept[:requests, 0] = slots[:, 0]
        if self._cache_mode == "align":
            size = self._spec.block_size
            computed = lengths - torch.diff(common.query_start_loc[: requests + 1])
            block = computed.clamp(min=0) // size
            crosses = block < (lengths - 1) // size
            ends = torch.where(crosses, (block + 1) * size - computed, NOT_KEPT)
            self.kept[:requests, 2] = ends
            self.kept[:requests, 3] = table.gather(1, block[:, None].long())[:, 0]

    def _clear(self, common: CommonAttentionMetadata, drafted: int) -> None:
        """Clear the states of requests of which nothing is computed yet.

        For those, which are at the begin of their prompts, the host's bound of lengths is exact.
        """
        bounds = common.seq_lens_cpu_upper_bound
        if bounds is None:
            raise RuntimeError("vLLM has not said how long the requests may be")
        lengths = torch.diff(common.query_start_loc_cpu[: drafted + 1])
        fresh = (bounds[:drafted] == lengths).nonzero().flatten()  # sync: host memory
        if len(fresh):
            slots = self.kept[async_tensor_h2d(fresh, device=self.kept.device), 0]
            for layer in self._layers:
                for state in layer.kv_cache:
                    state[slots] = 0


class WithDraftsOnCPU(WithDrafts):
    """As `WithDrafts`, for the kernels of a CPU."""

    def trees_of(
        self, common: CommonAttentionMetadata, drafted: int, rows: int, mask: TreeMask
    ) -> TreeForward:
        starts = common.query_start_loc[: drafted + 1].long()
        masks = mask.ctx_lens[:drafted], mask.ancestor_bits[:rows]
        return TreeForward(TreeStates.of(self.kept[:drafted, 0], starts, *masks))


@cache
def with_drafts(backend: Any, builder: type) -> Any:
    """Return vLLM's ``backend`` with a builder that ``builder`` precedes."""
    name = f"Tree{backend.__name__}"
    made = type(f"{name}Builder", (builder, backend.get_builder_cls()), {})
    return type(name, (backend,), {"get_builder_cls": staticmethod(lambda: made)})

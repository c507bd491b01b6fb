"""vLLM's builders of metadata for recurrent layers, with trees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from dyntree_kernels.cpu.tree_layers import TreeForward
from dyntree_kernels.recurrence import TreeStates
from dyntree_plugin.engine.attention.metadata import TreeMask, without_first

NOT_KEPT = -1
"""In place of a slot and of a forward: the request has no path to keep."""


@dataclass
class Drafted:
    """Metadata of a batch whose first ``rows`` rows belong to the requests with drafts.

    ``number``: of the forward. ``forward`` runs the rows. ``fresh`` int64: slots of states of which
    nothing is computed yet. ``rest``: vLLM's metadata of the other rows, as if they were the batch;
    None without others.
    """

    number: int
    rows: int
    forward: TreeForward
    fresh: torch.Tensor
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
        requests = vllm_config.scheduler_config.max_num_seqs
        self._forwards = 0
        self.kept = torch.full((requests, 2), NOT_KEPT, device=device)
        """Of each request of the batch, the slot of the state that an accepted path will advance,
        and the number of the forward."""

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
        others = without_first(common, drafted, rows)
        rest = others and build(common_prefix_len, others)
        slots = common.block_table_tensor[:drafted, 0].long()
        self._forwards += 1
        self.kept[:drafted, 0], self.kept[:, 1] = slots, self._forwards
        starts = common.query_start_loc[: drafted + 1].long()
        states = TreeStates.of(
            slots, starts, tree_mask.ctx_lens[:drafted], tree_mask.ancestor_bits[:rows]
        )
        begun = common.seq_lens[:drafted] > torch.diff(starts)
        return Drafted(self._forwards, rows, TreeForward(states), slots[~begun], rest)


def with_drafts(backend: Any) -> Any:
    """Return vLLM's ``backend`` with a builder `WithDrafts`."""
    name = f"Tree{backend.__name__}"
    builder = type(f"{name}Builder", (WithDrafts, backend.get_builder_cls()), {})
    return type(name, (backend,), {"get_builder_cls": staticmethod(lambda: builder)})

"""Stage 1, place: give the rows of tree nodes their positions, and the mask of who sees whom."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from vllm.v1.worker.gpu.input_batch import InputBatch

from dyntree_plugin.engine.attention.metadata import TreeMask
from dyntree_plugin.engine.step.trees import PlacedTrees


class PlaceRows(Protocol):
    """Does what `place` does, wherever the trees are."""

    def __call__(self, batch: InputBatch, *, all_trees: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """``all_trees``: whether every row of the batch is of a tree."""
        ...


def place_nodes(
    batch: InputBatch, place_rows: PlaceRows, *, same_bits: bool, lone_roots: bool = False
) -> TreeMask:
    """Turn the linear positions of a batch with drafts into those of tree nodes; make the mask.

    ``lone_roots``: whether the row of a decode without drafts counts as a tree without nodes.
    """
    drafts = batch.num_draft_tokens_per_req
    if drafts is None:
        raise RuntimeError("vLLM scheduled drafts without saying whose they are")
    drafted = int(np.count_nonzero(drafts))
    if not drafts[:drafted].all():
        raise RuntimeError("vLLM's batch does not begin with the requests that have drafts")
    requests = batch.num_reqs
    # A request has at least its drafts' rows and one more: none has others if the sums agree.
    has_plain = batch.num_tokens != batch.num_draft_tokens + requests
    has_plain = has_plain or (drafted < requests and not lone_roots)
    has_plain = has_plain or bool(batch.is_prefilling_np[:requests].any())
    ctx_lens, ancestor_bits = place_rows(batch, all_trees=not has_plain)
    return TreeMask(ctx_lens, ancestor_bits, has_plain, drafted=drafted, same_bits=same_bits)


def without_trees(batch: InputBatch) -> TreeMask:
    """Return the mask of a batch of plain rows that must have the bits that they always have."""
    lengths = torch.full((batch.num_reqs,), -1, dtype=torch.int32)
    bits = torch.zeros(batch.num_tokens, 1, dtype=torch.int32)
    return TreeMask(lengths, bits, has_plain=True, same_bits=True)


def place(
    batch: InputBatch, trees: PlacedTrees, prefill_len: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Change the batch's positions in place; return ``ctx_lens`` and ``ancestor_bits`` of TreeMask.

    ``prefill_len`` [slots]: tokens of each request's prompt. If one token of its prompt is left,
    vLLM fills a request up with drafts; these are not a tree.
    """
    slot, row = batch.expanded_idx_mapping, batch.expanded_local_pos.long()
    depth = trees.depths[slot, (row - 1).clamp(min=0)]
    rows = batch.logits_indices
    has_tree = batch.positions[rows] - row >= prefill_len[slot]
    batch.positions[rows] += torch.where(has_tree & (row > 0), depth - row, 0)

    num_reqs = batch.num_reqs
    lengths = batch.query_start_loc[1 : num_reqs + 1] - batch.query_start_loc[:num_reqs]
    num_logits = torch.diff(batch.cu_num_logits)
    is_tree = (num_logits > 1) & (lengths == num_logits)
    is_tree &= has_tree[batch.cu_num_logits[:-1].long()]
    bits = torch.zeros(batch.num_tokens, trees.words, dtype=torch.int32, device=rows.device)
    bits[rows] = trees.ancestors[slot, row]
    return torch.where(is_tree, batch.seq_lens[:num_reqs] - lengths, -1), bits


class WithTreePositions:
    """Replaces `ModelState.prepare_inputs` of a target with M-RoPE: places its nodes by depth.

    A position has several components (Qwen2-VL, arXiv 2409.12191, section 2.1), which vLLM computes
    after nodes are placed, as for a chain. In text all of them advance together, so a node's are
    the root's plus the depth.
    """

    def __init__(
        self,
        prepare_inputs: Callable[..., dict[str, Any]],
        take_shift: Callable[[], torch.Tensor | None],
    ) -> None:
        """``prepare_inputs`` is the stock method. ``take_shift`` gives, once per step, what placing
        added to the rows' positions, int64 [T]; None without trees."""
        self._prepare_inputs = prepare_inputs
        self._take_shift = take_shift

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs = self._prepare_inputs(*args, **kwargs)
        if (shift := self._take_shift()) is not None:
            inputs["positions"] += shift  # in place: a graph of the target reads this tensor
        return inputs

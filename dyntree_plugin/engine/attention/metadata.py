"""The mask of a batch's trees, and its way into vLLM's attention metadata."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.utils import AttentionGroup


@dataclass(frozen=True)
class TreeMask:
    """Which cache positions each of the T query rows of R requests sees.

    ``ctx_lens`` int32 [R]: every row of a request sees so many leading positions; -1 marks a
    request without a tree, which stays on the stock kernel. ``ancestor_bits`` int32 [T, words]: if
    bit ``c`` of a row is set, the row sees position ``ctx_len + c``. ``has_plain``: whether any
    request is without a tree, as known on the host. ``in_place``: the tensors are rewritten for
    every forward, so builders must keep references to them and no copies. ``drafted``: the number
    of requests with rows of drafts, which come first; in a prompt they are not a tree.
    ``same_bits``: every row, of a tree or not, must have the bits that it has in any batch.
    """

    ctx_lens: torch.Tensor
    ancestor_bits: torch.Tensor
    has_plain: bool
    in_place: bool = False
    drafted: int = 0
    same_bits: bool = False


@dataclass
class MaskedGroup(AttentionGroup):
    """Passes a mask to the builder of the group's metadata, with what the model's state passes.

    vLLM has an argument for more metadata, but states of hybrid models fill it themselves.
    """

    tree_mask: TreeMask | None = None

    def build_metadata(self, *args: Any, **kwargs: Any) -> Any:
        return super().build_metadata(*args, tree_mask=self.tree_mask, **kwargs)


def masked(
    groups: Sequence[Sequence[AttentionGroup]], mask: TreeMask
) -> list[list[AttentionGroup]]:
    """Return the groups such that vLLM builds their metadata for rows of trees.

    Raises:
        RuntimeError: for a group whose builder takes no mask.
    """
    for builder in (each.get_metadata_builder() for some in groups for each in some):
        if not getattr(builder, "takes_tree_mask", False):
            raise RuntimeError(
                f"{type(builder).__name__} takes no tree mask: its layers would attend to the rows "
                "of a tree as to a chain"
            )
    return [[MaskedGroup(**vars(each), tree_mask=mask) for each in some] for some in groups]


def refresh(metadata: dict[str, Any] | None) -> None:
    """Compute on the device what a forward's metadata derive from rows that were filled later.

    Metadata of a mask ``in_place`` that do so have a method ``refresh``. Those of all widths may
    share memory, so it is called before each forward.
    """
    made = {id(each): each for each in (metadata or {}).values()}
    for each in made.values():
        if (derive := getattr(each, "refresh", None)) is not None:
            derive()


def without_first(
    common: CommonAttentionMetadata, requests: int, rows: int
) -> CommonAttentionMetadata | None:
    """Return the batch without its first requests; None if there are no others."""
    if requests == common.num_reqs:
        return None
    bound, prefilling = common.seq_lens_cpu_upper_bound, common.is_prefilling
    starts = common.query_start_loc_cpu[requests:] - rows
    return common.replace(
        query_start_loc=common.query_start_loc[requests:] - rows,
        query_start_loc_cpu=starts,
        seq_lens=common.seq_lens[requests:],
        num_reqs=common.num_reqs - requests,
        num_actual_tokens=common.num_actual_tokens - rows,
        max_query_len=int(torch.diff(starts).max()),  # sync: host memory
        block_table_tensor=common.block_table_tensor[requests:],
        slot_mapping=common.slot_mapping[rows:],
        is_prefilling=None if prefilling is None else prefilling[requests:],
        seq_lens_cpu_upper_bound=None if bound is None else bound[requests:],
    )


class _Clock(Protocol):
    def next(self, stage: str) -> None: ...


class WithTreeMask:
    """Replaces `ModelState.prepare_attn`: passes the step's mask to the builders of metadata.

    Layers of the draft get no metadata here, since the target's forward does not run them; drafting
    builds its own. The target's forward follows, so the call also starts that stage on the clock.
    """

    def __init__(
        self,
        prepare_attn: Callable[..., dict[str, Any]],
        take_mask: Callable[[], TreeMask | None],
        clock: _Clock,
        draft_layers: frozenset[str],
    ) -> None:
        """``prepare_attn`` is the stock method; ``take_mask`` gives the mask once per step.
        ``draft_layers``: names of the draft's attention layers."""
        self._prepare_attn = prepare_attn
        self._take_mask = take_mask
        self._clock = clock
        self._draft_layers = draft_layers

    def __call__(
        self,
        input_batch: Any,
        cudagraph_mode: Any,
        block_tables: Any,
        slot_mappings: Any,
        attn_groups: Sequence[Sequence[Any]],
        *args: Any,
        **kwargs: Any,
    ) -> dict[str, Any]:
        of_target = [
            [each for each in groups if not self._draft_layers.issuperset(each.layer_names)]
            for groups in attn_groups
        ]
        mask = self._take_mask()
        if mask is not None:
            of_target = masked(of_target, mask)
        metadata = self._prepare_attn(
            input_batch, cudagraph_mode, block_tables, slot_mappings, of_target, *args, **kwargs
        )
        self._clock.next("target")
        return metadata

"""The requests of a batch, in one array that the host fills and a captured graph can read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.utils.torch_utils import np_to_pinned_tensor

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.sample.states import SamplingStates

COLUMNS = 7
PADDING = -1
"""In every column of what only fills a batch up."""


def pack(batch: InputBatch, states: SamplingStates) -> torch.Tensor:
    """The R requests of a batch, int64 [R, COLUMNS] on the host, for `Requests.of`."""
    requests = batch.num_reqs
    slots, bounds = batch.idx_mapping_np[:requests], batch.cu_num_logits_np[: requests + 1]
    num_logits = np.diff(bounds)
    columns = (
        slots,
        bounds[:-1],
        num_logits - 1,
        batch.query_start_loc_np[1 : requests + 1] - num_logits,
        batch.prefill_len_np[:requests],
        states.temperature.np[slots].view(np.int32),
        states.seeds.np[slots],
    )
    return np_to_pinned_tensor(np.stack(columns, axis=1).astype(np.int64, copy=False))


def all_greedy(packed: torch.Tensor) -> bool:
    """Whether every packed request has temperature 0; the host knows."""
    return not packed[:, 5].numpy().any()  # sync: host memory


@dataclass(frozen=True)
class Requests:
    """R requests, [R] each; int64 but for the temperature.

    ``index``: their places in vLLM's states, -1 for one that only fills the batch up. ``slots``:
    where their trees are stored. ``first``: row of the tree's root among those of logits, and
    ``root`` among all; ``drafts`` rows of nodes follow it. ``prefill_len``: tokens that the request
    had before its first was sampled. ``temperature`` float32, ``seeds``.
    """

    index: torch.Tensor
    slots: torch.Tensor
    first: torch.Tensor
    drafts: torch.Tensor
    root: torch.Tensor
    prefill_len: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor

    @classmethod
    def of(cls, packed: torch.Tensor, spare: int) -> Requests:
        """Of `pack`'s array on the device; the trees of padding are stored at ``spare``."""
        columns = packed.t().contiguous()
        index = columns[0]
        slots = torch.where(index < 0, spare, index)
        # A temperature's bits are those of a number that is not negative.
        first, drafts, root, prefill_len, bits = columns[1:6].clamp(min=0).unbind()
        temperature = bits.int().view(torch.float32)
        return cls(index, slots, first, drafts, root, prefill_len, temperature, columns[6])

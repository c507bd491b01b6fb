"""The requests of a batch, in one array that the host fills and a captured graph can read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.utils.torch_utils import np_to_pinned_tensor

from dyntree_plugin.tree.value import temperature_class

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.sample.states import SamplingStates

COLUMNS = 8
PADDING = -1
"""In every column of what only fills a batch up."""


def pack(batch: InputBatch, states: SamplingStates) -> torch.Tensor:
    """The R requests of a batch, int64 [R, COLUMNS] on the host, for `Requests`."""
    requests = batch.num_reqs
    slots, bounds = batch.idx_mapping_np[:requests], batch.cu_num_logits_np[: requests + 1]
    num_logits = np.diff(bounds)
    temperature = states.temperature.np[slots]
    classes = temperature_class(torch.from_numpy(temperature)).numpy()  # sync: host memory
    columns = (
        slots,
        bounds[:-1],
        num_logits - 1,
        batch.query_start_loc_np[1 : requests + 1] - num_logits,
        batch.prefill_len_np[:requests],
        temperature.view(np.int32),
        states.seeds.np[slots],
        classes,
    )
    return np_to_pinned_tensor(np.stack(columns, axis=1).astype(np.int64, copy=False))


def all_greedy(packed: torch.Tensor) -> bool:
    """Whether every packed request has temperature 0; the host knows."""
    return not packed[:, 5].numpy().any()  # sync: host memory


@dataclass(frozen=True)
class Requests:
    """R requests as `pack` has them, on the device; [R] each, int64 but for the temperature.

    What is not a part of ``packed`` is computed when it is first asked for. The trees of what only
    fills the batch up are stored at ``spare``.
    """

    packed: torch.Tensor
    spare: int

    @property
    def index(self) -> torch.Tensor:
        """Their places in vLLM's states, -1 for one that only fills the batch up."""
        return self.packed[:, 0]

    @property
    def classes(self) -> torch.Tensor:
        """Their classes of temperature, -1 for one that only fills the batch up."""
        return self.packed[:, 7]

    @cached_property
    def slots(self) -> torch.Tensor:
        """Where their trees are stored."""
        return torch.where(self.index < 0, self.spare, self.index)

    @property
    def first(self) -> torch.Tensor:
        """Row of the tree's root among those of logits."""
        return self._numbers[1]

    @property
    def drafts(self) -> torch.Tensor:
        """How many rows of nodes follow the root."""
        return self._numbers[2]

    @property
    def root(self) -> torch.Tensor:
        """Row of the tree's root among all."""
        return self._numbers[3]

    @property
    def prefill_len(self) -> torch.Tensor:
        """Tokens that the request had before its first was sampled."""
        return self._numbers[4]

    @cached_property
    def temperature(self) -> torch.Tensor:
        """float32."""
        # A temperature's bits are those of a number that is not negative.
        return self._numbers[5].int().view(torch.float32)

    @cached_property
    def seeds(self) -> torch.Tensor:
        return self.packed[:, 6].contiguous()

    @cached_property
    def _numbers(self) -> torch.Tensor:
        """Columns that are not negative; 0 in what only fills the batch up."""
        return self.packed.clamp(min=0).t().contiguous()

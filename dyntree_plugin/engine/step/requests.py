"""The requests of a batch in one array, which the host fills and a captured graph can read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.utils.torch_utils import np_to_pinned_tensor

from dyntree_plugin.tree.value import temperature_class

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.sample.states import SamplingStates

COLUMNS = 9
PADDING = -1
"""In every column of a padding request."""


class Packer:
    """Describes the R requests of a batch on the host, int64 [R, COLUMNS], for `Requests`.

    Most decode steps have the same rows of the same requests as the one before. They get the same
    array, which is neither packed again nor copied to the device again.
    """

    def __init__(self) -> None:
        self._last: tuple[list[bytes], torch.Tensor] | None = None

    def __call__(
        self, batch: InputBatch, states: SamplingStates, longest: np.ndarray
    ) -> torch.Tensor:
        """Describe the requests; ``longest`` int [slots]: the most tokens of each one's text."""
        requests = batch.num_reqs
        slots = batch.idx_mapping_np[:requests]
        numbers = (
            slots,
            batch.cu_num_logits_np[: requests + 1],
            batch.query_start_loc_np[1 : requests + 1],
            batch.prefill_len_np[:requests],
            states.temperature.np[slots],
            states.seeds.np[slots],
            longest[slots],
        )
        found = [each.tobytes() for each in numbers]
        if self._last is None or self._last[0] != found:
            self._last = found, _pack(*numbers)
        return self._last[1]


def _pack(
    slots: np.ndarray,
    bounds: np.ndarray,
    ends: np.ndarray,
    prefill_len: np.ndarray,
    temperature: np.ndarray,
    seeds: np.ndarray,
    longest: np.ndarray,
) -> torch.Tensor:
    num_logits = bounds[1:] - bounds[:-1]
    classes: Any = 0  # of greedy requests; to compute it would take as long as all the rest
    if temperature.any():
        classes = temperature_class(torch.from_numpy(temperature)).numpy()  # sync: host memory
    columns = (
        slots,
        bounds[:-1],
        num_logits - 1,
        ends - num_logits,
        prefill_len,
        temperature.view(np.int32),
        seeds,
        classes,
        longest,
    )
    packed = np.empty((len(slots), COLUMNS), dtype=np.int64)
    for number, column in enumerate(columns):
        packed[:, number] = column
    return np_to_pinned_tensor(packed)


@dataclass(frozen=True)
class Requests:
    """R requests on the device: the columns of `Packer`, [R] each, int64 but for the temperature.

    A column that has to be computed is computed when it is first read. The trees of padding
    requests are stored at ``spare``.
    """

    packed: torch.Tensor
    spare: int

    @property
    def index(self) -> torch.Tensor:
        """Slots in vLLM's states; -1 for padding."""
        return self.packed[:, 0]

    @property
    def classes(self) -> torch.Tensor:
        """Classes of temperature; -1 for padding."""
        return self.packed[:, 7]

    @cached_property
    def slots(self) -> torch.Tensor:
        """Slots of the trees."""
        return torch.where(self.index < 0, self.spare, self.index)

    @property
    def first(self) -> torch.Tensor:
        """Row of the tree's root among the rows of logits."""
        return self._numbers[1]

    @property
    def drafts(self) -> torch.Tensor:
        """Number of node rows after the root."""
        return self._numbers[2]

    @property
    def root(self) -> torch.Tensor:
        """Row of the tree's root in the batch."""
        return self._numbers[3]

    @property
    def prefill_len(self) -> torch.Tensor:
        """Tokens of the request's prompt."""
        return self._numbers[4]

    @cached_property
    def temperature(self) -> torch.Tensor:
        """Temperatures, float32."""
        # A temperature's bits are those of a number that is not negative.
        return self._numbers[5].int().view(torch.float32)

    @cached_property
    def seeds(self) -> torch.Tensor:
        return self.packed[:, 6].contiguous()

    @property
    def longest(self) -> torch.Tensor:
        """The most tokens of the text."""
        return self._numbers[8]

    @cached_property
    def _numbers(self) -> torch.Tensor:
        """All columns, 0 for padding."""
        return self.packed.clamp(min=0).t().contiguous()

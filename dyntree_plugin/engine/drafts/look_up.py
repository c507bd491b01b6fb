"""Look-up in the requests' texts, which vLLM keeps on the device: a source of tries."""

from __future__ import annotations

import torch
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor
from vllm.v1.worker.gpu.states import RequestState

from dyntree_kernels.tries import LookUp, Trie
from dyntree_plugin.engine.compose import Composer
from dyntree_plugin.engine.drafts.base import Steps, TreeProposals
from dyntree_plugin.engine.step.rows import GrowthMemory

MOST_TEXT_BYTES = 1 << 29
"""The largest array of texts that is moved to a GPU. One of 256 requests with 131072 tokens has a
quarter of that."""


class TextLookUp:
    """A `TrieSource` that searches what vLLM's request states hold of each text.

    vLLM appends a step's tokens to them on the device before it asks for drafts, also with
    asynchronous scheduling, and writes a text anew when a preempted request comes back. A request
    whose prompt is incomplete has its whole prompt there; no step verifies its tree.
    """

    def __init__(self, states: RequestState, look_up: LookUp, nodes: int, max_depth: int) -> None:
        """``nodes``: of each trie. ``max_depth``: of the deepest of them."""
        self._states = states
        self._look_up = look_up
        self._max_depth = max_depth
        self._room = Trie.room(states.max_num_reqs, nodes, states.device)

    def trie(self, slots: torch.Tensor) -> Trie:
        found = self._room.of(len(slots))
        texts, lengths = self._states.all_token_ids.gpu, self._states.total_len.gpu
        self._look_up(texts, lengths, slots.contiguous(), found, max_depth=self._max_depth)
        return found

    def roots(self, slots: torch.Tensor) -> torch.Tensor:
        lengths = self._states.total_len.gpu[slots.clamp(min=0)]
        return (lengths.long() - 1).clamp(min=0)


def move_texts_to_device(states: RequestState) -> bool:
    """Keep the texts in the device's memory instead of the host's; call it before any request.

    A device reads the host's memory more slowly than its own, and every look-up reads whole texts.
    Return False, and change nothing, if they would take more than `MOST_TEXT_BYTES`.
    """
    shape = states.max_num_reqs, states.max_model_len
    if 4 * shape[0] * shape[1] > MOST_TEXT_BYTES:
        return False
    states.all_token_ids = StagedWriteTensor(
        shape, dtype=torch.int32, device=states.device, uva_instead_of_gpu=False
    )
    return True


class LookUpSpeculator(TreeProposals):
    """Drafts without a model: all candidates come from tries."""

    supports_mm_inputs = False
    draft_logits = None

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, steps: Steps, compose: Composer
    ) -> None:
        self.steps, self.compose = steps, compose
        nodes, requests = compose.trees.shape.node_budget, vllm_config.scheduler_config.max_num_seqs
        self.draft_tokens = torch.zeros(requests, nodes, dtype=torch.int64, device=device)
        self.update_max_model_len(vllm_config.model_config.max_model_len)

    def update_max_model_len(self, max_model_len: int) -> None:
        requests, device = len(self.draft_tokens), self.draft_tokens.device
        memory = GrowthMemory.without_rows(requests, max_model_len - 1, device)
        self.drafter = self.compose.drafter(memory)

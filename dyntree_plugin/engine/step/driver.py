"""One decode step: place, verify, draft. vLLM runs the target between the first two."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.states import SamplingStates

from dyntree_plugin.engine.attention.metadata import TreeMask
from dyntree_plugin.engine.step.draft import Drafter
from dyntree_plugin.engine.step.ops import TreeOps
from dyntree_plugin.engine.step.place import place_nodes
from dyntree_plugin.engine.step.records import Sampled, Step
from dyntree_plugin.engine.step.requests import pack
from dyntree_plugin.engine.step.trees import PlacedTrees
from dyntree_plugin.engine.step.verify import TreeVerifier


class StepDriver:
    """Runs the stages of a decode step. vLLM's hooks call the methods in this order."""

    def __init__(
        self,
        trees: PlacedTrees,
        ops: TreeOps,
        states: Callable[[], SamplingStates],
        longest: np.ndarray,
        stages: int = 1,
    ) -> None:
        """``states``: gives the sampler's states, once there is a sampler. ``longest`` int
        [slots]: the most tokens of each request's text. ``stages``: of the pipeline, in which as
        many steps are under way."""
        self._trees = trees
        self._ops = ops
        self._states = states
        self._longest = longest
        self.step = Step()
        self._earlier = deque([Step()], maxlen=stages)

    @property
    def previous(self) -> Step:
        """The step that drafted the trees of this one: the last one of the same requests."""
        return self._earlier[0]

    def begin(self, most_forwards: int | None) -> None:
        self._earlier.append(self.step)
        self.step = Step(most_forwards)

    def place(self, batch: InputBatch, prefill_len: torch.Tensor) -> None:
        """Before the target's forward: rows of nodes get positions, and the batch a mask."""
        if batch.num_draft_tokens:
            with self._ops.clock("place"):
                self.step.mask = place_nodes(batch, self._trees, prefill_len, self._ops)

    def take_mask(self) -> TreeMask | None:
        """Give the mask to the target's attention, once."""
        mask, self.step.mask = self.step.mask, None
        return mask

    def verify(
        self,
        verifier: TreeVerifier,
        logits: torch.Tensor,
        batch: InputBatch,
        invalid_drafts: torch.Tensor | None,
    ) -> SamplerOutput:
        """After the target's forward: accept a path of each tree, and move its KV."""
        packed = self._packed(batch)
        output, self.step.verified, self.step.learning = verifier.run(
            packed, logits, batch, invalid_drafts
        )
        return output

    def draft(
        self,
        drafter: Drafter,
        batch: InputBatch,
        sampled: Sampled,
        *,
        grows: bool,
    ) -> torch.Tensor | None:
        """While the output travels to the host: learn from what was accepted, catch the draft up,
        and grow the next trees."""
        packed = self._packed(batch)
        with self._ops.clock("verify"):
            if self.step.learning is not None:
                self.step.learning()
            self.step.drafted = drafter.draft(self.step, packed, batch, sampled, grows=grows)
        return self.step.drafted.tokens

    def _packed(self, batch: InputBatch) -> torch.Tensor:
        if self.step.packed is None:
            self.step.packed = pack(batch, self._states(), self._longest)
        return self.step.packed

"""The draft's logits, corrected by a table that is learned from what the target says."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dyntree_kernels.contracts import Walked
from dyntree_kernels.residuals import (
    Expansions,
    ForwardRows,
    ResidualKernels,
    Residuals,
    ResidualTable,
    Texts,
    Visits,
)
from dyntree_plugin.engine.step.requests import Requests
from dyntree_plugin.engine.step.rows import TreeRows
from dyntree_plugin.tree.plan import TreePlan
from dyntree_plugin.tree.residuals import FADING, buckets_of


class DraftCorrection:
    """Corrects and records the logits of every expansion, and learns where the target went.

    All its tensors stay where they are. Records lie at the requests' slots, and hold for the tree
    whose root has the recorded position. The text before a position of a request never changes, and
    a slot is cleared for a new request, so records of another tree are never learned from.
    """

    def __init__(
        self,
        kernels: Callable[[Residuals], ResidualKernels],
        plan: TreePlan,
        texts: Texts,
        vocabulary: int,
    ) -> None:
        """``texts``: the ends of all slots' texts, which the engine keeps at fixed addresses.
        ``vocabulary``: the target's."""
        device, slots = texts.last.device, len(texts.last)
        self._texts = texts
        table = ResidualTable.room(buckets_of(vocabulary), vocabulary, device)
        expansions = Expansions.room(slots, 1 + plan.scratch_slots, device)
        self.residuals = Residuals(table, expansions, FADING)
        self._kernels = kernels(self.residuals)

    @property
    def memory(self) -> int:
        """Bytes of the table and the records."""
        tensors = (*self.residuals.table, *self.residuals.expansions)
        return sum(each.nbytes for each in tensors)

    def limit(self, proposed: torch.Tensor | None) -> None:
        """Learn of the ``proposed`` tokens alone, int64 ids; None for all."""
        known = self.residuals.table.proposed
        known.fill_(proposed is None)
        if proposed is not None:
            known[proposed] = True

    def roots(self, requests: Requests, logits: torch.Tensor) -> None:
        """Correct the logits after the roots, [R, V]."""
        self._kernels.correct_roots(logits, requests.index, self._texts)

    def rows(self, requests: Requests, logits: torch.Tensor, rows: TreeRows, first: int) -> None:
        """Correct the logits of a forward, [R * W, V]; ``first`` as in `NodeSource.forward`."""
        found = ForwardRows(rows.ids, rows.ancestor_bits, first)
        self._kernels.correct_rows(logits, requests.index, found)

    def learn(self, packed: torch.Tensor, logits: torch.Tensor, walked: Walked) -> None:
        """Learn from the target's ``logits`` of the ``packed`` requests' rows, as it gave them."""
        slots, first, prompts = (packed[:, column] for column in (0, 1, 4))
        found = Visits(slots, first, prompts, walked.positions, walked.path, walked.tokens)
        self._kernels.learn(logits, found)

    def clear(self, slots: torch.Tensor) -> None:
        """Forget the records at ``slots`` int64, which new requests take."""
        self.residuals.expansions.roots.index_fill_(0, slots, -1)

    def reset(self) -> None:
        """Forget what was learned, and all records."""
        table = self.residuals.table
        table.tokens.fill_(-1)
        table.biases.zero_()
        table.sums.zero_()
        self.residuals.expansions.roots.fill_(-1)

"""Trees through recurrent layers, with one state per request: what devices share.

A recurrent layer reads its inputs in order and keeps a state. A tree passes it in one forward that
does not write the state: every row continues from its parent's row. Afterwards a commit advances
the state along the accepted path. Layers are the gated delta rule (Gated DeltaNet, arXiv
2412.06464, equation 10), the state-space dual (Mamba-2, arXiv 2405.21060, section 6), and causal
convolutions in front of them or alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from dyntree_kernels.ancestors import unpack_bits


class TreeStates(NamedTuple):
    """What a recurrent layer reads of R requests with T rows.

    ``slots`` int64 [R]: the requests' states. ``starts`` int [R + 1]: request r has the rows
    starts[r] : starts[r + 1]. ``parents`` int64 [T]: each row's parent among the T rows, which is
    before it; -1 for a root.
    """

    slots: torch.Tensor
    starts: torch.Tensor
    parents: torch.Tensor

    @classmethod
    def of(
        cls,
        slots: torch.Tensor,
        starts: torch.Tensor,
        ctx_lens: torch.Tensor,
        ancestor_bits: torch.Tensor,
    ) -> TreeStates:
        """Derive the parents.

        Args:
            slots: int [R].
            starts: int [R + 1].
            ctx_lens: int [R]; -1 marks a request without a tree, whose rows are a chain.
            ancestor_bits: int32 [T, words]; bit c of a row is set if its request's row c is the row
                or an ancestor of it.
        """
        found = cls(slots.long(), starts, starts.new_empty(len(ancestor_bits)))
        of_row = found.requests
        place = torch.arange(len(of_row), device=starts.device) - starts[of_row]
        columns = torch.arange(32 * ancestor_bits.shape[1], device=starts.device)
        above = unpack_bits(ancestor_bits, len(columns)) & (columns < place[:, None])
        nearest = torch.where(above, columns, -1).amax(1)
        nearest = torch.where(ctx_lens[of_row] < 0, place - 1, nearest)
        parents = torch.where(nearest < 0, -1, starts[of_row] + nearest)
        return found._replace(parents=parents)

    @property
    def requests(self) -> torch.Tensor:
        """Each row's request, int64 [T]."""
        rows = torch.arange(len(self.parents), device=self.starts.device)
        return torch.searchsorted(self.starts[1:].contiguous(), rows, right=True)

    def taps(self, width: int) -> torch.Tensor:
        """Return what a convolution of ``width`` reads, as `inputs` expects it: int64 [T, width].

        They are a row's ancestors from the farthest on, and last the row.
        """
        at = [torch.arange(len(self.parents), device=self.parents.device)]
        for _ in range(width - 1):
            # One above a root is -1, and one above the k-th last entry of the history is -k - 1.
            at.append(torch.where(at[-1] >= 0, self.parents[at[-1].clamp(min=0)], at[-1] - 1))
        return torch.stack(at[::-1], dim=1)


class Commit(NamedTuple):
    """Accepted paths of R requests.

    ``slots`` int64 [R]: the requests' states, all different. ``paths`` int64 [R, D]: accepted rows
    from the root down, -1 after the last; none for a request whose state stays as it is.
    ``lengths`` int64 [R]: their numbers. ``ends`` int64 [R]: after so many rows of its path a
    request completes a block of the KV cache, if the path is as long; 0 or less if it cannot.
    ``end_slots`` int64 [R]: slots that then get the state after these rows, which a prefix cache
    may give to other requests.
    """

    slots: torch.Tensor
    paths: torch.Tensor
    lengths: torch.Tensor
    ends: torch.Tensor
    end_slots: torch.Tensor

    def taps(self, entries: int) -> torch.Tensor:
        """Return the last inputs on each path, as `inputs` expects them: int64 [R, entries]."""
        at = self.lengths[:, None] + torch.arange(-entries, 0, device=self.lengths.device)
        return torch.where(at >= 0, self.paths.gather(1, at.clamp(min=0)), at)


def inputs(
    taps: torch.Tensor, rows: torch.Tensor, history: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """Gather inputs of convolutions from rows and from what precedes them.

    Args:
        taps: int64 [M, W]: a row, or -k for the k-th last entry of the history.
        rows: [T, C].
        history: [slots, K, C], the last inputs before the root, the latest one last.
        slots: int64 [M].

    Returns:
        [M, W, C].
    """
    before = history[slots[:, None], (taps + history.shape[1]).clamp(0, history.shape[1] - 1)]
    return torch.where((taps >= 0)[..., None], rows[taps.clamp(min=0)], before)

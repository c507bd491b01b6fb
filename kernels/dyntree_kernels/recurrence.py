"""Trees through recurrent layers, with one state per request: what devices share, and an oracle.

A recurrent layer reads its inputs in order and keeps a state. A tree passes it in one forward that
does not write the state: every row continues from its parent's row. Afterwards a commit advances
the state along the accepted path. Layers are the gated delta rule (Gated DeltaNet, arXiv
2412.06464, equation 10), the state-space dual (Mamba-2, arXiv 2405.21060, section 6), and causal
convolutions in front of them or alone.

The oracle computes a tree as one chunk whose causal mask is the ancestor mask, as TreeWY
(arXiv 2608.20961) and STree (arXiv 2505.14969) do. An ancestor of an ancestor is an ancestor, so
each row's result depends on its path alone.
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


class Chunk(NamedTuple):
    """A chunk's results for a commit: sums of log decays [H, n] from the root on, and the rows'
    ``updates`` [H, n, V] of the state."""

    decays: torch.Tensor
    updates: torch.Tensor


def tree_chunk(
    seen: torch.Tensor,
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    log_decay: torch.Tensor,
    *,
    delta: bool,
) -> tuple[torch.Tensor, Chunk]:
    """Run the n rows of a tree through a layer of H heads as one chunk.

    Along a path, S = exp(log_decay) S, u = beta (v - S^T k) or without ``delta`` u = beta v, then
    S = S + k u^T, and the output is S^T q. For Mamba-2, k is B, q is C, v is x and beta is dt.

    Args:
        seen: bool [n, n]: whether row i is row j or below it. Parents come before children.
        state: [H, K, V], before the root.
        q, k: [H, n, K]; v: [H, n, V]; beta, log_decay: [H, n].

    Returns:
        The outputs [H, n, V], and what `committed` needs.
    """
    decays = log_decay @ seen.to(log_decay.dtype).T
    # An ancestor's sum is the larger one. The clamp keeps other pairs, which are masked, finite.
    between = (decays[..., None] - decays[:, None]).clamp(max=0).exp()
    kept = decays.exp()[..., None]
    updates = beta[..., None] * v
    if delta:
        updates = updates - beta[..., None] * ((k * kept) @ state)
        strict = seen & ~torch.eye(len(seen), dtype=torch.bool, device=seen.device)
        system = beta[..., None] * (k @ k.mT) * between * strict
        # By substitution in at least float32. A product of powers loses keys that are alike.
        eye = torch.eye(len(seen), dtype=k.dtype, device=seen.device)
        updates = torch.linalg.solve_triangular(
            eye + system, updates, upper=False, unitriangular=True
        )
    outputs = (q * kept) @ state + ((q @ k.mT) * between * seen) @ updates
    return outputs, Chunk(decays, updates)


def committed(
    state: torch.Tensor, path: torch.Tensor, k: torch.Tensor, chunk: Chunk
) -> torch.Tensor:
    """Return the state [H, K, V] after the rows ``path`` int64 [D], from the root down."""
    end = chunk.decays[:, path[-1], None]
    kept = k[:, path] * (end - chunk.decays[:, path]).exp()[..., None]
    return state * end[..., None].exp() + kept.mT @ chunk.updates[:, path]

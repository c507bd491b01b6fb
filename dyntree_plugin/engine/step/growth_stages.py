"""The stages of drafting: one growth, and the sources of its candidates."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dyntree_kernels.ancestors import unpack_bits
from dyntree_kernels.contracts import RequestParams, StepGrowth, expansions_of
from dyntree_kernels.paths import Paths
from dyntree_plugin.engine.step.catch_up import CatchUp
from dyntree_plugin.engine.step.records import Emitted, TargetStates
from dyntree_plugin.engine.step.requests import Requests
from dyntree_plugin.engine.step.rows import RowWriter, TreeRows, describe
from dyntree_plugin.engine.step.source import NodeSource
from dyntree_plugin.tree.source import TrieSource

Rank = Callable[[torch.Tensor, torch.Tensor, Paths], torch.Tensor]
"""Turns a draft's logits [R * W, V] into those that growth ranks, by the requests' slots int64 [R]
and the paths of the rows' nodes, W of which per request follow one another. The logits stay as they
are."""


class DraftPaths:
    """The tokens of the nodes that a step expands, by request and scratch column.

    They lie at a fixed address. A row's ancestor bits are the columns of its path, which ascend
    from the root down, since no node is expanded before its parent.
    """

    def __init__(self, requests: int, columns: int, depth: int, device: torch.device) -> None:
        """``requests``: the most of a step. ``columns``: nodes of a request that a step expands.
        ``depth``: of the deepest node; paths have room for as many tokens."""
        self._depth = depth
        self._tokens = torch.zeros(requests, columns, dtype=torch.int32, device=device)

    def of_roots(self, rows: int) -> Paths:
        """Return the paths of so many rows of roots, which are empty."""
        return Paths(self._tokens.new_zeros(rows, self._depth), self._tokens.new_zeros(rows))

    def add(
        self, requests: int, first: int, ids: torch.Tensor, ancestor_bits: torch.Tensor
    ) -> Paths:
        """Note the tokens of a forward's rows, and return the rows' paths.

        ``requests``: R. ``first``: the scratch column of each request's first row. ``ids`` int32
        [R * W]: the rows' tokens. ``ancestor_bits`` int32 [R * W, words] over the scratch columns.
        """
        width, columns = len(ids) // max(1, requests), self._tokens.shape[1]
        tokens = self._tokens[:requests]
        tokens[:, first : first + width].copy_(ids.view(requests, width))
        seen = unpack_bits(ancestor_bits, columns)
        # Columns off the path go after its last place.
        places = torch.where(seen, seen.cumsum(dim=1) - 1, self._depth).clamp(max=self._depth)
        found = tokens.new_zeros(len(ids), self._depth + 1)
        found.scatter_(1, places, tokens.repeat_interleave(width, dim=0))
        return Paths(found[:, : self._depth].contiguous(), seen.sum(dim=1, dtype=torch.int32))


class DraftStages:
    """The stages of drafting as functions of the batch's requests.

    What passes from one to the next lies at fixed addresses, so each can be captured as a graph.
    """

    def __init__(
        self,
        growth: StepGrowth,
        of_requests: RequestParams,
        *,
        source: NodeSource | None,
        writer: RowWriter | None,
        tries: TrieSource | None,
        widths: Sequence[int],
        max_depth: int,
        chained: torch.Tensor,
        pays: Callable[[StepGrowth], bool],
        block: int = 0,
    ) -> None:
        """Compose the sources of candidates with a growth.

        ``of_requests``: what ``growth`` reads of the most requests. ``source``: a draft model, with
        the ``writer`` of its rows; None without one. ``tries``: candidates that need no forward;
        None without any. ``widths``: nodes of a request in each forward. ``max_depth``: of the
        deepest node. ``chained`` bool [slots + 1]: requests whose trees are chains; the last entry
        is for padding. ``pays``: as in `TreeOps`. ``block``: positions that a block draft predicts
        in one forward; 0 for other sources. Its later forwards run no model and are not counted.

        Raises:
            ValueError: if there is no source at all.
        """
        if source is None and tries is None:
            raise ValueError("growth needs a draft model or tries")
        self._widths = tuple(widths)
        self.widths = () if block else self._widths
        self.block = block
        self._growth = growth
        self._of_requests = of_requests
        self._source = source
        self._writer = writer
        self._tries = tries
        self._chained = chained
        self._pays = pays
        self._narrow = False  # whether the step's forwards have one row of each request
        # Kernels that verification has compiled read paths of the same form.
        most = len(of_requests.slots)
        self._paths = DraftPaths(most, sum(self._widths), max_depth, self.device)

    @property
    def device(self) -> torch.device:
        return self._of_requests.slots.device

    @property
    def has_draft(self) -> bool:
        """Whether a draft model has to catch up, and can make forwards."""
        return self._source is not None

    @property
    def resumable(self) -> bool:
        """Whether each stage can be captured by itself."""
        return self._growth.resumable

    def receive(self, emitted: Emitted, target: TargetStates) -> None:
        """Copy what `catch_up` reads of the target."""
        self._draft.receive(emitted, target)

    def catch_up(self, requests: Requests, emitted: Emitted) -> None:
        self._draft.follow(requests, emitted)

    def catch_up_prompts(self, step: CatchUp) -> None:
        """Catch up in a batch with prompts; it has no graph."""
        self._draft.follow_prompts(step)

    def root(self, requests: Requests, rank: Rank | None = None, *, narrow: bool = False) -> None:
        """Start the trees; ``rank``: None to rank the draft's logits as they are. ``narrow``:
        whether forwards may have one row of each request where all trees are chains."""
        logits = self.root_logits(requests)
        self._narrow = narrow and not self.block and self._growth.narrow()
        if logits is not None:
            self.pick_roots(requests, logits, rank)

    def root_logits(self, requests: Requests) -> torch.Tensor | None:
        """Start the trees, and return the draft's logits after the roots; None without a draft."""
        self._narrow = False
        if self._writer is not None:
            self._writer.begin(requests, self._chained)
        elif self._tries is not None:
            roots = self._tries.roots(requests.index)
            describe(requests, roots, self._chained, self._of_requests)
        self._growth.start(len(requests.packed))
        if self._tries is not None:
            self._growth.graft(self._tries.trie(requests.index))
        return None if self._source is None else self._source.root_logits(len(requests.packed))

    @property
    def kept(self) -> tuple[torch.Tensor, ...]:
        """What `root_logits` has left for the forwards after it, with R entries each."""
        return self._draft.kept

    @kept.setter
    def kept(self, kept: tuple[torch.Tensor, ...]) -> None:
        self._draft.kept = kept

    def pick_roots(
        self, requests: Requests, logits: torch.Tensor, rank: Rank | None = None
    ) -> None:
        """Take the roots' children; below them, all that a block draft has; ``rank`` as in
        `root`."""
        self.pick(requests, logits, self._paths.of_roots(len(logits)), rank)
        if self.block:
            all(self.forward(requests, number, rank) for number in range(len(self._widths)))

    def forward(self, requests: Requests, number: int, rank: Rank | None = None) -> bool:
        """Run the next forward, unless no node is left or it does not pay; ``rank`` as in `root`.

        With ``rank`` it must have ranked the logits of the root and of all earlier forwards.
        """
        rows = self._rows(requests, number)
        if self._growth.expand(rows.ancestor_bits) == 0:
            return False
        if not (self.block or self._pays(self._growth)):
            return False
        logits = self._draft.forward(rows, *self._shape(requests, number))
        paths = None if rank is None else self._paths_of(requests, number, rows)
        self.pick(requests, logits, paths, rank)
        return True

    def forward_logits(self, requests: Requests, number: int) -> tuple[torch.Tensor, Paths]:
        """Run the next forward, and return its logits and its rows' paths. `pick` comes next."""
        rows = self._rows(requests, number)
        self._growth.expand(rows.ancestor_bits)
        logits = self._draft.forward(rows, *self._shape(requests, number))
        return logits, self._paths_of(requests, number, rows)

    def pick(
        self, requests: Requests, logits: torch.Tensor, paths: Paths | None, rank: Rank | None
    ) -> None:
        """Take the children of the last expansions; without ``rank`` no ``paths`` are read."""
        if rank is not None and paths is not None:
            logits = rank(logits, requests.index, paths)
        self._growth.pick(logits)

    def finish(self) -> torch.Tensor:
        """Store the trees; return the tokens of their nodes."""
        return self._growth.finish()

    def resume(self, requests: Requests, forwards: int) -> None:
        """Go on after so many forwards: for stages that are captured apart."""
        self._growth.resume(len(requests.packed), forwards)

    def _rows(self, requests: Requests, number: int) -> TreeRows:
        if self._writer is None:
            raise RuntimeError("without a draft model there are no rows")
        return self._writer.rows(len(requests.packed), 1 if self._narrow else self._widths[number])

    def _shape(self, requests: Requests, number: int) -> tuple[int, int]:
        """Return the number of requests, and the first expansion of a forward."""
        first = 1 + number if self._narrow else expansions_of(self._widths, number + 1)[0]
        return len(requests.packed), first

    def _paths_of(self, requests: Requests, number: int, rows: TreeRows) -> Paths:
        count, first = self._shape(requests, number)
        return self._paths.add(count, first - 1, rows.ids, rows.ancestor_bits)

    @property
    def _draft(self) -> NodeSource:
        if self._source is None:
            raise RuntimeError("without a draft model there is nothing to run")
        return self._source


class Eager:
    """A `DraftRun` that runs the stages as they are."""

    def __init__(self, stages: DraftStages, requests: Requests, rank: Rank | None = None) -> None:
        """``rank``: as in `DraftStages.root`."""
        self._stages = stages
        self._requests = requests
        self._rank = rank

    def catch_up(self, step: CatchUp) -> None:
        self._stages.receive(step.emitted, step.target)
        self._stages.catch_up(self._requests, step.emitted)

    def root(self) -> None:
        self._stages.root(self._requests, self._rank, narrow=True)

    def forward(self, number: int) -> bool:
        return self._stages.forward(self._requests, number, self._rank)

    def finish(self, forwards: int) -> torch.Tensor:
        return self._stages.finish()

"""Stages of a step as CUDA graphs, one for each of a few numbers of requests.

vLLM runs its draft models without graphs. A decode step needs nothing of the host but the
requests' rows and the number of draft forwards, so placing, verification, the catch-up, runs of
forwards and every finished tree are a graph each. The first run begins with the roots and look-up,
which have a separate graph for steps without a forward. What passes from one graph to the next lies
at fixed addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from vllm.v1.worker.gpu.input_batch import InputBuffers

from dyntree_kernels.contracts import Walked
from dyntree_plugin.engine.attention.buffers import MaskBuffers
from dyntree_plugin.engine.cuda.captured_catch_up import CapturedCatchUp
from dyntree_plugin.engine.cuda.captured_logits import CapturedLogits
from dyntree_plugin.engine.cuda.captured_placing import CapturedPlacing
from dyntree_plugin.engine.cuda.graph_memory import GraphMemory
from dyntree_plugin.engine.cuda.graphs import Input, Record, RequestGraphs, Tensors, request_sizes
from dyntree_plugin.engine.step.catch_up import CatchUp
from dyntree_plugin.engine.step.growth_stages import DraftStages, Eager, Rank
from dyntree_plugin.engine.step.ops import DraftRun
from dyntree_plugin.engine.step.records import Emitted, Learning
from dyntree_plugin.engine.step.requests import COLUMNS, PADDING, Requests
from dyntree_plugin.engine.step.trees import PlacedTrees
from dyntree_plugin.engine.step.verify import TreeVerifier
from dyntree_plugin.tree.drafting import grow

MOST_REQUESTS = 128
"""The largest batch that is captured."""


def packed_input(most: int, device: torch.device) -> Input:
    """Make the memory of at most so many packed requests."""
    packed = torch.zeros(most, COLUMNS, dtype=torch.int64, device=device)
    return Input(packed, PADDING, constant=True)


class CapturedStages:
    """`Graphs` of placing, verification and drafting; what was not captured runs eagerly."""

    def __init__(
        self,
        make: Callable[[DraftStages], CapturedDrafting],
        recording: Callable[[], AbstractContextManager[Record]],
        hidden: Callable[[], Sequence[torch.Tensor]] = tuple,
    ) -> None:
        """``make``: makes room for graphs of drafting. ``recording``: gives what captures a call,
        as long as it is entered. ``hidden``: where the target's graphs leave the hidden states that
        a draft reads, if it reads any and there are such graphs."""
        self._make = make
        self._recording = recording
        self._hidden = hidden
        self._drafting: CapturedDrafting | None = None
        self._verification: CapturedVerification | None = None
        self._placing: CapturedPlacing | None = None
        self._memory: GraphMemory | None = None

    @property
    def fewest_forwards(self) -> int:
        return 0 if self._drafting is None else self._drafting.fewest_forwards

    @property
    def has_drafting(self) -> bool:
        """Whether drafting is to be captured."""
        return self._drafting is not None

    def prepare(self, stages: DraftStages | None) -> None:
        self._drafting = None if stages is None else self._make(stages)

    def capture(self) -> None:
        if self._drafting is None:
            return
        with self._recording() as record:
            if self._memory is None:
                self._drafting.capture(record, self._hidden())
            else:
                self._memory.capture(self._drafting.stages, record)

    @contextmanager
    def profiled(self, memory: GraphMemory) -> Iterator[None]:
        """Let ``memory`` choose what `capture` captures, for graphs that are never replayed."""
        self._memory = memory
        try:
            yield
        finally:
            self._memory = None

    def capture_verification(self, verifier: TreeVerifier, most: int) -> None:
        """Capture batches of up to ``most`` requests; the KV cache must be there."""
        if not verifier.reads_logits:
            self._verification = CapturedVerification(verifier, most, self._drafting)
            with self._recording() as record:
                self._verification.capture(record)

    def capture_placing(
        self, trees: PlacedTrees, buffers: InputBuffers, masks: MaskBuffers, most: int
    ) -> None:
        """Capture batches of up to ``most`` requests, for drafting that is captured."""
        if self._drafting is not None:
            of_batch = self._drafting.packed, request_sizes(most), buffers
            self._placing = CapturedPlacing(*of_batch, trees, masks)
            with self._recording() as record:
                self._placing.capture(record)

    def drop_of_cache(self) -> None:
        """Forget graphs that need a KV cache, or masks, that are about to go."""
        self._verification = self._placing = None

    def placing(self, packed: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Replay the placing of a batch of so many ``rows``, which are all of trees; return what
        `TreeOps.place` does. None if it was not captured for this batch."""
        if self._placing is None or self._placing(packed) is None:
            return None
        return self._placing.room(len(packed), rows)

    def verification(
        self, packed: torch.Tensor, sampled: torch.Tensor
    ) -> tuple[Walked, Learning | None] | None:
        return None if self._verification is None else self._verification(packed, sampled)

    def drafting(self, packed: torch.Tensor, rank: Rank | None = None) -> DraftRun | None:
        return None if self._drafting is None else self._drafting.player(packed, rank)


class CapturedVerification:
    """Walk and move in one graph, and learning in another."""

    def __init__(
        self, verifier: TreeVerifier, most: int, drafting: CapturedDrafting | None
    ) -> None:
        """``drafting``: reads the requests and what they got where verification has them; None if
        there is none of as many requests."""
        device, rows = verifier.buffers.device, verifier.trees.shape.node_budget + 1
        sampled = torch.zeros(most * rows, dtype=torch.int64, device=device)
        requests, sizes = packed_input(most, device), request_sizes(most)
        self._verifier = verifier
        # Results are copied to the host while graphs of drafting run. Memory of this graph's pool
        # could belong to those as well.
        self._room = verifier.allocate(most)
        if drafting is not None:
            requests, of = drafting.packed, drafting.emitted
            self._room = self._room._replace(
                positions=of.roots, tokens=of.tokens, emitted=of.counts
            )
            if (states := drafting.catch_up.states) is not None:
                self._room = self._room._replace(roots=states.root_rows, path=states.path)
        inputs = [requests, Input(sampled, rows=rows)]
        self._walk = RequestGraphs(self._run_walk, inputs, sizes)
        self._learn: RequestGraphs | None = None
        if verifier.learns:
            self._learn = RequestGraphs(self._run_learn, [requests], sizes)

    def capture(self, record: Record) -> None:
        self._walk.capture(record)
        if self._learn is not None:
            self._learn.capture(record)

    def __call__(
        self, packed: torch.Tensor, sampled: torch.Tensor
    ) -> tuple[Walked, Learning | None] | None:
        values = self._walk(packed, sampled)
        if values is None:
            return None
        learning = None if self._learn is None else partial(self._learn.replay, len(packed))
        return Walked(*values), learning

    def _run_walk(self, packed: torch.Tensor, sampled: torch.Tensor) -> Tensors:
        room, no_logits = self._room_of(packed), sampled.new_zeros(0, 0)
        requests = self._requests(packed)
        walked = self._verifier.walk(requests, sampled, None, room, no_logits)
        self._verifier.keep(requests, walked)
        return tuple(walked)

    def _run_learn(self, packed: torch.Tensor) -> Tensors:
        self._verifier.learn(self._requests(packed), self._room_of(packed))
        return ()

    def _requests(self, packed: torch.Tensor) -> Requests:
        return Requests(packed, self._verifier.trees.spare)

    def _room_of(self, packed: torch.Tensor) -> Walked:
        return Walked(*(each[: len(packed)] for each in self._room))


class CapturedDrafting:
    """The stages of drafting, each a graph; all growth is one if it cannot be resumed, or if there
    is no draft model or a block draft, so that every step has the same stages."""

    def __init__(
        self,
        stages: DraftStages,
        numbers_emitted: Sequence[int],
        most: int,
        spare: int,
        vocabulary: int,
        fewest_forwards: int = 0,
        nodes: int = 0,
    ) -> None:
        """``numbers_emitted``: how many tokens a request can get at most, for trees of each size.
        ``most``: the most requests of a captured batch. ``vocabulary``: the target's.
        ``fewest_forwards``: of a step. ``nodes``: of the largest tree."""
        self._stages = stages
        self._spare = spare
        sizes = request_sizes(most)
        device = stages.device

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(most, *shape, dtype=dtype, device=device)

        self.packed = packed = packed_input(most, device)
        """The requests that were filled in last."""
        width = max(numbers_emitted)
        self.emitted = Emitted(
            zeros(dtype=torch.int64),
            zeros(width, dtype=torch.int64),
            zeros(dtype=torch.int32),
            most=width,
        )
        """What the catch-up's graphs read."""
        columns = sorted(numbers_emitted) if stages.has_draft else ()
        self.catch_up = CapturedCatchUp(
            stages, self.requests, packed, self.emitted, columns, sizes, rows=1 + nodes
        )

        def graphs(function: Callable[..., Tensors]) -> RequestGraphs:
            return RequestGraphs(function, [packed], sizes)

        every = len(stages.widths)
        self.whole = self.root = None
        self.logits: CapturedLogits | None = None
        self.runs: dict[range, RequestGraphs] = {}
        self.runs_of: dict[int, list[range]] = {}
        """By the number of forwards of a step."""
        self.finish: dict[int, RequestGraphs] = {}
        self.fewest_forwards = fewest_forwards
        if not stages.resumable or not stages.has_draft or stages.block:
            self.whole = graphs(self._run_whole)
            self.fewest_forwards = every
        else:
            self.root = None if fewest_forwards else graphs(self._run_root)
            numbers = range(fewest_forwards, every + 1)
            # A number that is always the same needs no parts.
            split = runs_of if len(numbers) > 1 else _one_run
            self.runs_of = {number: split(number) for number in numbers}
            runs = dict.fromkeys(run for each in self.runs_of.values() for run in each)
            self.runs = {run: graphs(partial(self._run_forwards, run)) for run in runs}
            self.finish = {n: graphs(partial(self._run_finish, n)) for n in numbers}
        if stages.resumable and stages.has_draft:
            self.logits = CapturedLogits(stages, packed, sizes, self.requests, vocabulary)

    @property
    def stages(self) -> list[RequestGraphs]:
        """The graphs of every stage, those that end with logits at the end."""
        growth = [graphs for graphs in (self.root, self.whole) if graphs is not None]
        ranked = () if self.logits is None else self.logits.stages
        grown = (*self.runs.values(), *self.finish.values())
        return [*self.catch_up.graphs.values(), *growth, *grown, *ranked]

    def capture(self, record: Record, hidden: Sequence[torch.Tensor] = ()) -> None:
        """Capture all graphs; ``hidden``: as `CapturedCatchUp.read_states` takes it."""
        self.catch_up.read_states(hidden)
        for graphs in self.stages:
            graphs.capture(record)
        if self.logits is not None:
            self.logits.compile()

    def player(self, packed: torch.Tensor, rank: Rank | None = None) -> DraftRun | None:
        """Replay the stages for these requests; None for a batch that was not captured."""
        if not self.first.serves(len(packed)):
            return None
        if rank is None or self.logits is None or not self.logits.serves(len(packed)):
            return Replay(self, packed)
        return RankedReplay(self, self.logits, packed, rank)

    @property
    def first(self) -> RequestGraphs:
        """The graphs that growth begins with, which take the requests alone."""
        return self.whole or self.root or next(iter(self.runs.values()))

    def requests(self, packed: torch.Tensor) -> Requests:
        """Name the columns of packed requests on the device."""
        return Requests(packed, self._spare)

    def _run_root(self, packed: torch.Tensor) -> Tensors:
        self._stages.root(self.requests(packed))
        return ()

    def _run_forwards(self, run: range, packed: torch.Tensor) -> Tensors:
        requests = self.requests(packed)
        for number in run:
            if number:
                self._stages.resume(requests, number)
            else:
                self._stages.root(requests)
            self._stages.forward(requests, number)
        return ()

    def _run_finish(self, forwards: int, packed: torch.Tensor) -> Tensors:
        requests = self.requests(packed)
        self._stages.resume(requests, forwards)
        return (self._stages.finish(),)

    def _run_whole(self, packed: torch.Tensor) -> Tensors:
        eager = Eager(self._stages, self.requests(packed))
        return (grow(eager, len(self._stages.widths))[0],)


def runs_of(forwards: int) -> list[range]:
    """Split so many forwards into runs of a power of two each, the longest first.

    So a step replays few graphs whatever their number, and few different runs are captured.
    """
    found, first = [], 0
    while first < forwards:
        end = first + (1 << ((forwards - first).bit_length() - 1))
        found.append(range(first, end))
        first = end
    return found


def _one_run(forwards: int) -> list[range]:
    return [range(forwards)] if forwards else []


class Replay:
    """A `DraftRun` that replays graphs over the requests of one step."""

    def __init__(self, drafting: CapturedDrafting, packed: torch.Tensor) -> None:
        self._drafting = drafting
        self._packed = packed

    def catch_up(self, step: CatchUp) -> None:
        self._drafting.catch_up.replay(self._packed, step)

    def root(self) -> None:
        self.fill()  # The first run of forwards begins with the root.

    def forward(self, number: int) -> bool:
        return True  # `finish` knows how many there are, and replays them in few graphs.

    def fill(self) -> None:
        """Fill in the requests, where neither verification nor the catch-up has a graph."""
        self._drafting.first.fill((self._packed,))

    def finish(self, forwards: int) -> torch.Tensor:
        drafting, requests = self._drafting, len(self._packed)
        for run in drafting.runs_of.get(forwards, ()):
            drafting.runs[run].replay(requests)
        if not forwards and drafting.root is not None:
            drafting.root.replay(requests)
        return self.finish_grown(forwards)

    def finish_grown(self, forwards: int) -> torch.Tensor:
        """Build trees that have begun, whatever the number of forwards."""
        graphs = self._drafting.whole or self._drafting.finish[forwards]
        return graphs.replay(len(self._packed))[0]


class RankedReplay:
    """A `DraftRun` that replays graphs, and ranks the draft's logits between them."""

    def __init__(
        self, drafting: CapturedDrafting, logits: CapturedLogits, packed: torch.Tensor, rank: Rank
    ) -> None:
        self._replay = Replay(drafting, packed)
        self._of_block = drafting.whole is not None
        self._logits = logits
        self._requests = drafting.requests(drafting.packed.buffer[: len(packed)])
        self._rank = rank

    def catch_up(self, step: CatchUp) -> None:
        self._replay.catch_up(step)

    def root(self) -> None:
        self._replay.fill()
        self._logits.root(self._requests, self._rank)

    def forward(self, number: int) -> bool:
        self._logits.forward(self._requests, number, self._rank)
        return True

    def finish(self, forwards: int) -> torch.Tensor:
        return self._logits.finish() if self._of_block else self._replay.finish_grown(forwards)

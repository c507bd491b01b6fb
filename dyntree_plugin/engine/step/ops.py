"""What a device brings to a step, in one object; and how stages are replayed from graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from dyntree_plugin.tree.drafting import Stages

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from dyntree_kernels.contracts import GrowthSettings, StepGrowth, Walk, Walked
    from dyntree_kernels.drawn import DecideTrees
    from dyntree_kernels.learning import Learn
    from dyntree_kernels.paths import PathKernels
    from dyntree_kernels.tries import LookUp
    from dyntree_plugin.engine.layer_kinds import LayerKind
    from dyntree_plugin.engine.step.catch_up import CatchUp
    from dyntree_plugin.engine.step.clock import Clock
    from dyntree_plugin.engine.step.growth_stages import DraftStages, Rank
    from dyntree_plugin.engine.step.records import Learning
    from dyntree_plugin.engine.step.rows import RowMemory, RowWriter
    from dyntree_plugin.engine.step.trees import PlacedTrees
    from dyntree_plugin.tree.children import Perturb


Arrival = Callable[[], torch.Tensor]
"""Wait for a copy to arrive, and return the tensor on the host."""

Send = Callable[[torch.Tensor], Arrival]
"""Start to copy a tensor to the host."""


def at_hand(tensor: torch.Tensor) -> Arrival:
    """Return an arrival for a tensor that is on the host already."""
    return lambda: tensor


class TreeOps(Protocol):
    """A device's kernels, and the few decisions that depend on the device."""

    @property
    def perturb(self) -> Perturb: ...

    @property
    def walk(self) -> Walk: ...

    @property
    def learn(self) -> Learn: ...

    @property
    def look_up(self) -> LookUp: ...

    @property
    def paths(self) -> PathKernels: ...

    @property
    def decide_trees(self) -> DecideTrees: ...

    @property
    def kept_tokens(self) -> int:
        """The most tokens of a draft's distribution that trees are drawn from."""
        ...

    @property
    def clock(self) -> Clock: ...

    @property
    def send(self) -> Send: ...

    @property
    def kinds(self) -> Sequence[LayerKind]:
        """The kinds of layers of a target that trees can pass."""
        ...

    def place(
        self, batch: InputBatch, trees: PlacedTrees, prefill_len: torch.Tensor, *, all_trees: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Do what `place.place` does; ``all_trees``: whether every request has a tree."""
        ...

    def row_writer(self, memory: RowMemory) -> RowWriter:
        """Make what fills the rows of draft forwards."""
        ...

    def compiled_growth(self, settings: GrowthSettings) -> StepGrowth:
        """Make the growth that serves."""
        ...

    def pays(self, growth: StepGrowth) -> bool:
        """Return whether the nodes that ``growth`` has chosen are worth a draft forward. A device
        whose host cannot know says that they are."""
        ...

    def most_emitted(self, bound: int, emitted: torch.Tensor) -> int:
        """Bound the tokens that a request got in a step, from ``bound``, which the host knows, and
        ``emitted`` [R], which the device knows."""
        ...


class DraftRun(Stages[torch.Tensor], Protocol):
    """Runs the stages of drafting over the requests of one step."""

    def catch_up(self, step: CatchUp) -> None:
        """Let the draft read the emitted tokens; all requests decode."""
        ...


class Graphs(Protocol):
    """Replays stages that were captured. Whether a stage runs eagerly is decided here alone."""

    @property
    def fewest_forwards(self) -> int:
        """Draft forwards that captured drafting always runs."""
        ...

    def prepare(self, stages: DraftStages | None) -> None:
        """Make room for graphs of these stages; None to draft eagerly. It is called whenever there
        is a new KV cache."""
        ...

    def capture(self) -> None:
        """Capture the stages that `prepare` got."""
        ...

    def verification(
        self, packed: torch.Tensor, sampled: torch.Tensor
    ) -> tuple[Walked, Learning | None] | None:
        """Replay walk and move; also return what replays learning, if anything is learned. None if
        they were not captured for this batch."""
        ...

    def drafting(self, packed: torch.Tensor, rank: Rank | None = None) -> DraftRun | None:
        """Replay the stages of drafting; None if they were not captured for this batch.

        ``rank`` as in `DraftStages.root`. Stages that were captured without a place for it rank the
        draft's logits as they are.
        """
        ...


class NoGraphs:
    """`Graphs` of an engine that runs every stage eagerly."""

    fewest_forwards = 0

    def prepare(self, stages: DraftStages | None) -> None:
        pass

    def capture(self) -> None:
        pass

    def verification(
        self, packed: torch.Tensor, sampled: torch.Tensor
    ) -> tuple[Walked, Learning | None] | None:
        return None

    def drafting(self, packed: torch.Tensor, rank: Rank | None = None) -> DraftRun | None:
        return None

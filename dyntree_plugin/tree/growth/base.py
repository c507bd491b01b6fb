"""The parts that all growths share: description, configuration, and the calls of one step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from dyntree_plugin.tree.shape import Sampling, TreeShape
from dyntree_plugin.tree.token_tree import TokenTree


@dataclass(frozen=True)
class Frontier:
    """The nodes that the next draft forward runs on, [R, width] each.

    ``ancestors`` int32 [R, width, words] are bits over the scratch columns of the step, and each
    node's own column is among them. ``above`` int64 are the expansions of the nodes' parents: 0 for
    the root, 1 + c for the node in scratch column c. Where ``valid`` is false, nothing was left to
    expand.
    """

    tokens: torch.Tensor
    depths: torch.Tensor
    ancestors: torch.Tensor
    valid: torch.Tensor
    above: torch.Tensor


class Growth(Protocol):
    """One step's growth over R requests. Call ``add`` and ``frontier`` in turn, then ``finish``.

    ``sampling`` says how the driver picks ``children`` tokens below every node. ``widths`` are the
    frontier nodes of each draft forward after the root's.
    """

    @property
    def sampling(self) -> Sampling: ...

    @property
    def children(self) -> int: ...

    @property
    def widths(self) -> tuple[int, ...]: ...

    def add(
        self,
        tokens: torch.Tensor,
        log_probs: torch.Tensor,
        distributions: torch.Tensor | None = None,
    ) -> None:
        """Add the children of the last frontier; the first call adds the root's (width 1, or
        `GrowthPlan.roots`).

        ``tokens`` int64 and ``log_probs`` float32 are [R, width, children]. A log probability of
        ``-inf`` means that there is no such child. A growth that draws gets its children in the
        order of the draws. ``distributions`` float32 [R, width, V] are the log probabilities that
        the children were drawn from. They are given with every call or with none, and end up in
        the tree's ``draws``.
        """

    def frontier(self) -> Frontier:
        """Pick the nodes of the next draft forward."""

    def finish(self) -> TokenTree:
        """Return the tree of everything that was added."""


@dataclass(frozen=True, slots=True)
class GrowthConfig:
    """A growth and its settings. None stands for the growth's default.

    ``parameter`` is the value of the growth's option, if it has one
    (`GrowthSpec.parameter`). ``sampling`` chooses among the growth's samplings.
    """

    name: str = "topk"
    parameter: Any = None
    sampling: Sampling | None = None


@dataclass(frozen=True)
class GrowthPlan:
    """A growth for one engine, with everything that is known before any token.

    ``start`` begins a step's growth. It takes the number of requests and ``columns`` int64 [R],
    the number of scratch columns that each request has room for. It is None for the growth that
    serves, which is compiled (`dyntree_kernels.contracts.StepGrowth`). With several ``roots``, one
    for each draft, the first call of `Growth.add` has that width, and every frontier is split
    evenly, one part for each draft.
    """

    sampling: Sampling
    children: int
    widths: tuple[int, ...]
    start: Callable[[int, torch.Tensor], Growth] | None
    roots: int = 1

    @property
    def scratch_slots(self) -> int:
        """Nodes expanded in one step, each of which needs a KV slot in the draft's cache."""
        return sum(self.widths)


@dataclass(frozen=True)
class GrowthSpec:
    """Everything that the rest of the project knows about a growth.

    ``summary`` ends the sentence "NAME grows …" in the option's help. ``reads`` are the fields of
    `TreeShape` that change its trees, besides ``node_budget``. ``samplings`` are the ways in which
    its children may come from the draft, the default first; a growth that offers draws decides
    whether to draw before it knows what the draw gives. ``plan`` takes the shape, the sampling,
    and the parameter's value or None; it raises a ValueError that names the parameter if the value
    does not fit. ``parameter`` is the name of the growth's option. ``ordered`` growths put
    their nodes in the order of their values, so that the first nodes of a tree are its best.
    ``one_child``: no node has more than one child. ``takes_tries``: look-up may add nodes.
    """

    name: str
    summary: str
    reads: tuple[str, ...]
    samplings: tuple[Sampling, ...]
    plan: Callable[[TreeShape, Sampling, Any], GrowthPlan]
    parameter: str | None = None
    ordered: bool = False
    one_child: bool = False
    takes_tries: bool = False

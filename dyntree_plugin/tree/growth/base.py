"""What every growth has in common: how it is asked for, driven, and checked against the paper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from dyntree_plugin.tree.names import Sampling
from dyntree_plugin.tree.token_tree import TokenTree


@dataclass(frozen=True)
class Frontier:
    """The nodes that the next draft forward runs on, [R, width] each.

    ``ancestors`` int32 [R, width, words] are bits over the scratch columns of the step, own
    column included. Where ``valid`` is false there was nothing left to expand. ``values`` float32:
    log of the estimated chance that the path down to a node is accepted, ``-inf`` where not valid;
    None where nothing was ranked.
    """

    tokens: torch.Tensor
    depths: torch.Tensor
    ancestors: torch.Tensor
    valid: torch.Tensor
    values: torch.Tensor | None = None


class Growth(Protocol):
    """One step's growth over R requests. Call ``add`` and ``frontier`` in turn, then ``finish``.

    ``sampling``: how the driver picks ``children`` tokens below every node. ``widths``: frontier
    nodes of each draft forward after the root's.
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
        """Add the children of the last frontier, or first of the root (width 1).

        ``tokens`` int64, ``log_probs`` float32 (``-inf``: no such child), both
        [R, width, children]; of a sampled growth in draw order. ``distributions`` float32
        [R, width, V]: the log probabilities that the children were drawn from, for growths that
        draw; given once, they must be given always, and end up in the tree's ``draws``.
        """

    def frontier(self) -> Frontier:
        """Pick the nodes of the next draft forward."""

    def finish(self) -> TokenTree:
        """The tree, from everything that was added."""


@dataclass(frozen=True, slots=True)
class GrowthConfig:
    """Which growth, and its parameters; None is the growth's default.

    ``min_value``: the least value of a node of growth ``topk``. ``threshold``: t of growth
    ``threshold``. ``expansion``: children of every node at depth 0, 1,
    … of growth ``expansion``. ``acceptance``: of growth ``sequoia``, how often the target's token
    is a node's first child, its second, …. ``sampling``: for growths that offer several.

    Raises:
        ValueError: naming the parameter, its value and what is allowed.
    """

    name: str = "topk"
    min_value: float | None = None
    threshold: float | None = None
    expansion: tuple[int, ...] | None = None
    acceptance: tuple[float, ...] | None = None
    sampling: Sampling | None = None

    def __post_init__(self) -> None:
        for name in ("min_value", "threshold"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise ValueError(f"{name}={value} must be above 0 and at most 1")
        if self.expansion is not None and not (self.expansion and min(self.expansion) >= 1):
            raise ValueError(f"expansion={self.expansion} must be numbers of children, each >= 1")
        if self.acceptance is not None and not (
            self.acceptance and min(self.acceptance) >= 0 and 0 < sum(self.acceptance) <= 1 + 1e-6
        ):
            raise ValueError(
                f"acceptance={self.acceptance} must be probabilities, their sum in (0, 1]"
            )
        for parameter in _PARAMETER.values():
            if getattr(self, parameter) is not None and parameter != _PARAMETER.get(self.name):
                owner = next(name for name, its in _PARAMETER.items() if its == parameter)
                raise ValueError(
                    f"{parameter}={getattr(self, parameter)} is for growth={owner}, not {self.name}"
                )

    def pick_sampling(self, *offered: Sampling) -> Sampling:
        """The sampling asked for, or the first of those that the growth offers.

        Raises:
            ValueError: if the growth does not offer it.
        """
        if self.sampling is None:
            return offered[0]
        if self.sampling not in offered:
            raise ValueError(
                f"sampling={self.sampling} must be {' or '.join(offered)} for growth={self.name}"
            )
        return self.sampling


_PARAMETER = {
    "topk": "min_value",
    "threshold": "threshold",
    "expansion": "expansion",
    "sequoia": "acceptance",
}
"""The parameter of each growth that has one."""

SHAPE_READ: dict[str, tuple[str, ...]] = {
    "topk": ("max_depth", "width", "children"),
    "dyspec": ("max_depth", "children"),
    "threshold": ("max_depth", "children"),
    "dynamic_threshold": ("max_depth", "width", "children"),
    "expansion": (),
    "sequoia": ("max_depth",),
    "chain": ("max_depth",),
}
"""What each growth makes of a `TreeShape`, beside ``node_budget``; the rest it decides itself."""


@dataclass(frozen=True)
class GrowthPlan:
    """A growth for an engine: what is known before any token. ``start`` begins a step's growth.

    ``start`` takes the number of requests and ``columns`` int64 [R]: how many scratch columns
    each request has room for.
    """

    sampling: Sampling
    children: int
    widths: tuple[int, ...]
    start: Callable[[int, torch.Tensor], Growth]

    @property
    def scratch_slots(self) -> int:
        """Nodes expanded in one step, each of which needs a KV slot in the draft's cache."""
        return sum(self.widths)


Path = tuple[int, ...]
"""The tokens from below the root to a node: names a node in the reference implementations."""

Draft = Callable[[Path], Sequence[float]]
"""D(· | x, path): the draft's distribution below a node."""

Draw = Callable[[Path, Sequence[float]], int]
"""y ~ R below a node."""


class Slot(NamedTuple):
    """A node of a reference tree.

    ``slot`` is v before the node's token is drawn, in paper notation; ``value`` is v of its first
    child, the estimated acceptance of the path down to it.
    """

    path: Path
    slot: float
    value: float

"""Derive a tree's shape from the options."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dyntree_plugin.options.text import specs
from dyntree_plugin.tree.shape import Budget, TreeShape

DRAWN_CHILDREN = 16
"""Default children for growths that draw, since some draws are unlikely tokens."""

MOST_FORWARDS = 16
"""Default of max_forwards with an adaptive budget, which makes no forward that does not pay, and
where chains and trees of up to `DRAWN_DEEP` nodes are drawn."""

DRAWN_DEEP = 32
"""On the embedded pair, drawn trees of 32 nodes emit 1.05 to 1.10 times as much with 16 forwards as
with 10, and chains of 16 tokens 1.2 times as much as of 8; trees of 64 nodes showed no gain."""

BLOCK_NODES = 16
"""Least default of node_budget with a block draft."""

LOOK_UP_DEPTH = 32
"""Largest default depth with look-up, whose nodes cost no forward."""


def default_shape(node_budget: int) -> tuple[int, int, int]:
    """Return the draft forwards, width and children that suit a budget.

    On the embedded pair with learned values, 16 and 64 nodes and temperature 1, more of any gains
    less than 3 % accepted tokens, and forwards cost time.
    """
    root = math.ceil(math.sqrt(node_budget))
    forwards = min(max(round(2 * math.log2(node_budget)), 1), node_budget)
    return forwards, min(root, 32), min(max(root, 2), 8)


def shape_of(
    given: Mapping[str, Any],
    node_budget: int,
    budget: Budget,
    *,
    draft: bool,
    head: bool = False,
    block: int = 0,
) -> TreeShape:
    """Fill in the shape of trees of ``node_budget`` nodes.

    ``given``: every option's value, None where the user gives none. ``draft``: there is a draft
    model, a ``head`` of the target, or a draft of ``block`` tokens at once.

    Raises:
        ValueError: beginning with the name of an option that does not fit the others.
    """
    forwards, width, children = default_shape(node_budget)
    drawn = given["exactness"] == "distribution" and node_budget <= DRAWN_DEEP
    if budget == "adaptive" or drawn:
        forwards = min(node_budget, MOST_FORWARDS)
    if given["expansion"] is not None:
        forwards = len(given["expansion"])
    looks_up = _looks_up(given, draft)
    if block:
        _check_block(given)
        usual = min(block, node_budget)
        depth = forwards = _depths(given, node_budget, usual, False, block)[0]
    else:
        depth, forwards = _depths(given, node_budget, forwards, looks_up)
    spec = specs("growth")[given["growth"]]
    if "children" in spec.reads and "best" not in spec.samplings:
        children = DRAWN_CHILDREN
    most_forwards = forwards if "max_forwards" in spec.reads else None
    return TreeShape(
        node_budget,
        depth,
        given["width"] or width,
        given["children"] or children,
        given["coupling"] == "on",
        most_forwards if draft else 0,
        node_budget if looks_up else 0,
        1 + len(given["drafts"] or ()),
        head,
        block,
    )


def _check_block(given: Mapping[str, Any]) -> None:
    for name, served in (("growth", ("topk",)), ("exactness", ("tokens", "bits"))):
        if given[name] not in (None, *served):
            raise ValueError(
                f"{name}={given[name]} does not go with a block draft: use {' or '.join(served)}"
            )
    if given["drafts"]:
        given_drafts = [*given["drafts"]]
        raise ValueError(f"drafts={given_drafts} does not go with a block draft: leave it out")


def _looks_up(given: Mapping[str, Any], draft: bool) -> bool:
    """Return whether look-up adds candidates."""
    growth, growths = given["growth"], specs("growth")
    possible = growths[growth].takes_tries
    fitting = " or ".join(spec.name for spec in growths.values() if spec.takes_tries)
    if given["lookup"] == "on" and not possible:
        raise ValueError(f"lookup='on' is for growth={fitting}, not {growth}: leave it out")
    if not draft and not possible:
        raise ValueError(
            f"growth={growth} needs a draft model: use growth={fitting}, or method "
            "draft_model in --speculative-config"
        )
    if not draft and given["lookup"] == "off":
        raise ValueError(
            "lookup='off' leaves nothing to draft with: leave it out, or use method draft_model in "
            "--speculative-config"
        )
    return possible and given["lookup"] != "off"


def _depths(
    given: Mapping[str, Any], node_budget: int, usual: int, looks_up: bool, block: int = 0
) -> tuple[int, int]:
    """Return the depth of the deepest node, and the most draft forwards; see `shape_of`.

    ``usual``: the draft forwards where nothing limits them.
    """
    limits = {"node_budget": node_budget}
    if 0 < block < node_budget:
        limits["num_speculative_tokens"] = block
    for name in ("max_depth", "max_forwards"):
        value = given[name]
        if value is None:
            continue
        limiting, limit = list(limits.items())[-1]
        if value > limit:
            raise ValueError(
                f"{name}={value} cannot be reached with {limiting}={limit}: lower {name} to at "
                f"most {limit}, or raise {limiting}"
            )
        limits[name] = value
    if not looks_up:
        forwards = given["max_forwards"] or given["max_depth"] or usual
        return given["max_depth"] or forwards, forwards
    reached = max(min(node_budget, LOOK_UP_DEPTH), given["max_forwards"] or 0)
    depth = given["max_depth"] or reached
    return depth, given["max_forwards"] or min(usual, depth)

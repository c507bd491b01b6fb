"""What growing the trees of one step costs besides the draft forwards, for every growth.

    python scripts/time_growth.py [--batch 32] [--nodes 64] [--threads 2]

Prints a Markdown table, and where it was measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch
from torch.utils.benchmark import Timer

from dyntree_plugin.provenance import provenance
from dyntree_plugin.tree.children import sampled_children, top_children
from dyntree_plugin.tree.growth import GrowthConfig, GrowthPlan
from dyntree_plugin.tree.registry import GROWTHS, plan_growth
from dyntree_plugin.tree.shape import TreeShape
from dyntree_plugin.tree.token_tree import TokenTree

VOCABULARY = 1000
PARAMETERS: dict[str, Any] = {
    "expansion": (2, 2, 2, 2, 1),
    "sequoia": (0.6, 0.15, 0.08, 0.04),
}


def children_of(plan: GrowthPlan, requests: int) -> list[tuple[torch.Tensor, ...]]:
    """Children for every draft forward, from random logits."""
    made = []
    for width in (1, *plan.widths):
        log_probs = (2 * torch.randn(requests * width, VOCABULARY)).log_softmax(1)
        if plan.sampling == "best":
            found = top_children(log_probs, plan.children)
        else:
            noise = -torch.empty_like(log_probs).exponential_().log()
            found = sampled_children(log_probs, plan.children, noise)
        made.append(tuple(x.view(requests, width, plan.children) for x in found))
    return made


@torch.inference_mode()
def grow(
    plan: GrowthPlan, columns: torch.Tensor, children: list[tuple[torch.Tensor, ...]]
) -> TokenTree:
    growth = plan.start(len(columns), columns)
    growth.add(*children[0])
    for of_frontier in children[1:]:
        growth.frontier()
        growth.add(*of_frontier)
    return growth.finish()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    lines = [
        "| growth | children | draft forwards | nodes | ms per step |",
        "|---|---|---|---|---|",
    ]
    for name in GROWTHS:
        # Growths that draw keep more children: unlikely draws must not use up the places.
        children = 4 if name == "topk" else 16
        shape = TreeShape(args.nodes, max_depth=8, width=8, children=children)
        plan = plan_growth(GrowthConfig(name, PARAMETERS.get(name)), shape)
        columns = torch.full((args.batch,), plan.scratch_slots)
        made = children_of(plan, args.batch)
        nodes = float(grow(plan, columns, made).counts.double().mean())
        timer = Timer(
            "grow(plan, columns, made)",
            globals={"grow": grow, "plan": plan, "columns": columns, "made": made},
            num_threads=args.threads,
        )
        spent = timer.blocked_autorange(min_run_time=1.0).median * 1e3
        forwards = 1 + len(plan.widths)
        lines.append(f"| {name} | {plan.children} | {forwards} | {nodes:.0f} | {spent:.2f} |")
    sys.stdout.write("\n".join([*lines, "", json.dumps(provenance(), indent=1), ""]))


if __name__ == "__main__":
    main()

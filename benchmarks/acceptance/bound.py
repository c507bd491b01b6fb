"""Estimate what any trees with so many nodes can emit that keep the target's distribution.

    python -m benchmarks.acceptance.bound [--method eagle3] [--output FILE]

Let w(x) be the chance that a step's tree holds the path x below the root, and p(x) the target's
chance of it. What follows the tokens that a step emits is drawn from the target. So if the path is
accepted up to its j-th token, the target's chance of the rest is as before, and x is accepted with
at most p(x) min_j min(1, w(x_1..j) / p(x_1..j)). With X drawn from the target, and Y from the
draft, whose chance is q:

    tokens per step <= 1 + E[sum over l of min_{j <= l} min(1, w(X_1..j) / p(X_1..j))]
    nodes of a tree  =     E[sum over l of w(Y_1..l) / q(Y_1..l)]

w follows from what the draft says along the path, does not exceed 1, and never rises from a node to
its child. Here a small net is w, fitted on half of the contexts at which steps of a block chain
begin. The other half gives the figures. A better w would give higher ones. With an EAGLE-3 head,
paths begin at every fourth token of what the target writes.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedModel

from benchmarks.acceptance.drafting import Grown
from benchmarks.acceptance.experiment import Pair
from benchmarks.acceptance.heads import HeadPaths
from benchmarks.acceptance.methods import METHODS, Setting
from benchmarks.acceptance.models import Decoder, load
from benchmarks.acceptance.simulate import simulate
from benchmarks.acceptance.texts import Prompts
from benchmarks.acceptance.verifying import Blocks
from dyntree_plugin import pair as embedded
from dyntree_plugin.provenance import provenance
from dyntree_plugin.tree.children import ChildPicker
from dyntree_plugin.tree.perturb import perturb_on
from dyntree_plugin.tree.token_tree import Accepted
from dyntree_plugin.tree.value import AcceptanceEstimate
from dyntree_plugin.tune.eagle import load_head

DEVICE = torch.device("cpu")
BUDGETS = (4, 8, 16, 32, 64)
CHAINS = (4, 8, 16, 24)
CHAIN, TOKENS, DEPTH, CONTEXTS = 16, 64, 28, 800
COSTS = (0.4, 0.25, 0.16, 0.09, 0.05, 0.025, 0.012)
"""Tokens per step that a node has to be worth."""


@dataclass(frozen=True)
class Paths:
    """Logs of both models' chances of the tokens on paths, and what the draft said before each:
    ``target`` and ``draft`` [C, L], ``said`` [C, L, 4]."""

    target: torch.Tensor
    draft: torch.Tensor
    said: torch.Tensor

    def part(self, rows: torch.Tensor) -> Paths:
        return Paths(self.target[rows], self.draft[rows], self.said[rows])


class PathChances(torch.nn.Module):
    """The log of w along paths, [C, L]."""

    def __init__(self) -> None:
        super().__init__()
        last = torch.nn.Linear(24, 1)
        torch.nn.init.zeros_(last.weight)
        self.net = torch.nn.Sequential(torch.nn.Linear(9, 24), torch.nn.Tanh(), last)
        self.first = torch.nn.Parameter(torch.tensor(0.2))

    def forward(self, paths: Paths) -> torch.Tensor:
        own = torch.cat([paths.said, paths.draft[..., None]], dim=-1)
        above = torch.nn.functional.pad(own.cumsum(1)[:, :-1], (0, 0, 1, 0))[..., :4] / 5
        steps = paths.draft + 1.5 * torch.tanh(self.net(torch.cat([own, above], -1))[..., 0])
        steps = torch.cat([steps[:, :1] + self.first, steps[:, 1:]], dim=1)
        return steps.cumsum(1).cummin(1).values.clamp(max=0)


def accepted(log_chances: torch.Tensor, paths: Paths) -> torch.Tensor:
    """Return how many tokens of each path are accepted at most, [C]."""
    ratio = log_chances - paths.target.cumsum(1)
    return ratio.clamp(max=0).cummin(1).values.exp().sum(1)


def nodes(log_chances: torch.Tensor, paths: Paths) -> torch.Tensor:
    """Return an estimate of a tree's nodes from each path that the draft drew, [C]."""
    return (log_chances - paths.draft.cumsum(1)).clamp(max=12).exp().sum(1)


@torch.inference_mode()
def beginnings(pair: Pair, prompts: Prompts, temperature: float) -> list[list[int]]:
    """Return the contexts at which steps of a block chain begin."""
    target, draft = pair.target, pair.draft
    plan = METHODS["block"].plan(Setting(CHAIN, temperature, CHAIN, (), 1))
    pick = ChildPicker(plan, perturb_on(draft.device), AcceptanceEstimate(draft.device))
    verifier = Blocks(target, prompts, temperature, prompts.longest + TOKENS + CHAIN + 1)
    texts = [
        [*row[:length], first]
        for row, length, first in zip(
            prompts.tokens.tolist(),
            prompts.lengths.tolist(),
            verifier.first().tolist(),
            strict=True,
        )
    ]
    ends = [len(text) - 1 + TOKENS for text in texts]
    found: list[list[int]] = []

    def observe(grown: Grown, step: Accepted) -> None:
        going = [text for text, end in zip(texts, ends, strict=True) if len(text) < end]
        sizes = (step.lengths + 1).tolist()
        for text, tokens, size in zip(going, step.tokens.tolist(), sizes, strict=True):
            found.append([*text])
            text += tokens[:size]

    simulate(plan, pick, [draft], prompts, verifier, temperature, TOKENS, observe)
    return found


@torch.inference_mode()
def paths_after(
    contexts: Prompts,
    target: PreTrainedModel,
    draft: PreTrainedModel,
    temperature: float,
    writer: PreTrainedModel,
    generator: torch.Generator,
) -> Paths:
    """Draw a path after each context from the ``writer``, one of the two."""
    decoders = [Decoder(each, len(contexts), contexts.longest + DEPTH) for each in (target, draft)]
    fresh, sizes = contexts.tokens, contexts.lengths
    columns: list[tuple[torch.Tensor, ...]] = []
    for _ in range(DEPTH):
        laws = [(d.append(fresh, sizes) / temperature).log_softmax(1) for d in decoders]
        law = laws[0 if writer is target else 1].exp()
        fresh = torch.multinomial(law, 1, generator=generator)
        columns.append((*(each.gather(1, fresh)[:, 0] for each in laws), laws[1]))
        sizes = torch.ones_like(sizes)
    return paths_of(*(torch.stack(each, 1) for each in zip(*columns, strict=True)))


def paths_of(target: torch.Tensor, draft: torch.Tensor, laws: torch.Tensor) -> Paths:
    """Return paths from the logs of both models' chances [C, L], and of all tokens' in the draft's
    distributions before each, [C, L, V]."""
    q = laws.exp()
    said = [-(q * laws.clamp(min=-1e4)).sum(2), laws.amax(2), (q * q).sum(2).log()]
    said.append((torch.arange(laws.shape[1]) / 8).expand_as(said[0]))
    return Paths(target.clamp(min=-30), draft.clamp(min=-30), torch.stack(said, 2))


def fit(chances: PathChances, cost: float, along_target: Paths, along_draft: Paths) -> None:
    """Fit w to what it gains, if a node costs so many tokens."""
    optimizer = torch.optim.Adam(chances.parameters(), lr=0.005)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 300)
    for _ in range(300):
        gained = accepted(chances(along_target), along_target).mean()
        spent = nodes(chances(along_draft), along_draft).mean()
        optimizer.zero_grad()
        (cost * spent - gained).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(chances.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def of_draft(pair: Pair, texts: list[str], temperature: float) -> list[Paths]:
    """Return paths of the target, and of the draft, after contexts at which steps begin."""
    generator = torch.Generator().manual_seed(0)
    begun = beginnings(pair, pair.prompts(texts, 0), temperature)
    chosen = torch.randperm(len(begun), generator=generator)[:CONTEXTS].tolist()
    contexts = Prompts.of([begun[at] for at in chosen], 0, pair.target.device)
    return [
        paths_after(contexts, pair.target, pair.draft, temperature, writer, generator)
        for writer in (pair.target, pair.draft)
    ]


def of_head(pair: Pair, texts: list[str], temperature: float) -> list[Paths]:
    """Return paths of the target, and of the embedded head."""
    stored = embedded.paths()
    plain = LlamaForCausalLM.from_pretrained(stored["target"], dtype=torch.float32)
    prompts = pair.prompts(texts, 0)
    begun = HeadPaths(pair.target, prompts, temperature, TOKENS, DEPTH, every=4)
    generator = torch.Generator().manual_seed(0)
    return [paths_of(*each) for each in begun.along(plain, load_head(stored["eagle3"]), generator)]


def bound(along: list[Paths], temperature: float) -> dict[str, Any]:
    """Return points (nodes, tokens per step, standard error) of the bound, and block chains.

    ``along``: paths of the target, and of the draft.
    """
    half = torch.arange(len(along[0].target)) < len(along[0].target) // 2
    learned, held = ([each.part(rows) for each in along] for rows in (half, ~half))
    chances, points = PathChances(), []
    for cost in COSTS:
        fit(chances, cost, *learned)
        with torch.no_grad():
            spent = nodes(chances(held[1]), held[1]).mean()
            points.append([float(spent), *_mean(1 + accepted(chances(held[0]), held[0]))])
    chains = {}
    for length in CHAINS:
        log_chances = held[0].draft.cumsum(1)
        log_chances[:, length:] = -math.inf
        chains[str(length)] = _mean(1 + accepted(log_chances, held[0]))
    return {"temperature": temperature, "points": points, "block_chains": chains}


def _mean(values: torch.Tensor) -> list[float]:
    return [float(values.mean()), float(values.std() / math.sqrt(len(values)))]


def table(bounds: list[dict[str, Any]]) -> str:
    """Return the bound at some budgets, between the points that were fitted, in Markdown."""
    lines = ["| temperature | nodes | bound | best block chain | bound / chain |"]
    lines.append("|---:" * 5 + "|")
    for found in bounds:
        spent, emitted, errors = np.array(found["points"]).T
        for n in BUDGETS:
            most, error = (np.interp(math.log(n), np.log(spent), y) for y in (emitted, errors))
            chains = [own for length, own in found["block_chains"].items() if int(length) <= n]
            best, spread = max(chains)
            lines.append(
                f"| {found['temperature']:g} | {n} | {most:.2f} ± {error:.2f} | {best:.2f} ± "
                f"{spread:.2f} | {most / best:.2f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Bound what trees can emit.")
    parser.add_argument("--method", choices=["draft_model", "eagle3"], default="draft_model")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.6, 1.0])
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    models = [load(embedded.paths()[name], DEVICE, torch.float32) for name in ("target", "draft")]
    pair = Pair(models[0], models[1:], AutoTokenizer.from_pretrained(embedded.paths()["target"]))
    texts = embedded.held_out_prompts(given.prompts)
    along = of_head if given.method == "eagle3" else of_draft
    found = [bound(along(pair, texts, each), each) for each in given.temperatures]
    sys.stdout.write(table(found) + "\n")
    if given.output:
        value = {"provenance": provenance(), "prompts": given.prompts, "bounds": found}
        given.output.write_text(json.dumps(value, indent=1) + "\n")


if __name__ == "__main__":
    main()

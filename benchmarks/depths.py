"""Measure trees by their nodes and their depth, and chains by their length, on the embedded pair:
python -m benchmarks.depths

A tree's depth is the number of draft forwards that grow it. So this tells what each forward is
worth, which `gpu_model` sets against what it costs. Drawn chains are verified token by token, and
as blocks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoTokenizer

from benchmarks.acceptance.experiment import Laboratory, Pair, Trial
from benchmarks.acceptance.methods import METHODS
from benchmarks.acceptance.models import load
from benchmarks.acceptance.workloads import WORKLOADS
from benchmarks.laboratory import BLOCK, CHAIN, TREE
from dyntree_plugin import pair as embedded
from dyntree_plugin.commands.vocabulary import shared
from dyntree_plugin.provenance import provenance

NODES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24)
MOST_PER_LEVEL = 16
"""Trees with more nodes for each level of their depth are left out: they lack candidates."""
LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24)
TEMPERATURES = (0.0, 0.6, 1.0)


def trials(prompts: int, tokens: int) -> Iterator[Trial]:
    """Yield what is tried: every depth with the trees that have it, then chains."""
    calibration = prompts // 4
    texts = WORKLOADS["code"](prompts + calibration)
    measured, others = texts.part(slice(prompts)), texts.part(slice(prompts, None))
    chains = Trial(
        measured,
        others,
        methods=[METHODS[CHAIN], METHODS[BLOCK]],
        budgets=list(LENGTHS),
        temperatures=list(TEMPERATURES),
        tokens=tokens,
        max_depth=max(LENGTHS),
        seed=0,
        posterior=False,
    )
    for depth in DEPTHS:
        nodes = [each for each in NODES if depth <= each <= MOST_PER_LEVEL * depth]
        yield replace(chains, methods=[METHODS[TREE]], budgets=nodes, max_depth=depth)
    yield chains


def cells(prompts: int, tokens: int) -> Iterator[dict[str, Any]]:
    """Yield the mean figures of a step, for every tree and chain at every temperature."""
    target, draft = embedded.target_and_draft()
    device = torch.device("cpu")
    models = [load(path, device, torch.float32) for path in (target, draft)]
    pair = Pair(models[0], models[1:], AutoTokenizer.from_pretrained(target))
    for trial in trials(prompts, tokens):
        for cell in Laboratory(pair, trial).run():
            counts = cell.counts
            yield {
                "method": cell.method.name,
                "temperature": cell.setting.temperature,
                "budget": cell.setting.budget,
                "depth": cell.setting.max_depth,
                "steps": counts.steps,
                "tokens_per_step": counts.tokens / counts.steps,
                "draft_forwards_per_step": counts.forwards / counts.steps,
                "draft_rows_per_step": counts.expanded / counts.steps,
                "nodes_per_step": counts.nodes / counts.steps,
            }


def main(
    output: Annotated[Path, shared("--output", "A JSON file.")],
    prompts: Annotated[
        int, shared("--num-prompts", "A quarter as many more calibrate.", min=4)
    ] = 64,
    tokens: Annotated[int, shared("--max-tokens", min=2)] = 64,
) -> None:
    """Measure trees by nodes and depth, and chains by length."""
    found = []
    for cell in cells(prompts, tokens):
        found.append(cell)
        print(*(f"{value:.5g}" if isinstance(value, float) else value for value in cell.values()))  # noqa: T201
    settings = {"prompts": prompts, "calibration": prompts // 4, "tokens": tokens}
    result = {"settings": settings, "cells": found, "provenance": provenance()}
    output.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    typer.run(main)

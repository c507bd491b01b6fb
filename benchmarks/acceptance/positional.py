"""Measure how often a target takes its draft's first choice, its second, …, on held-out code.

    python -m benchmarks.acceptance.positional [TARGET DRAFT]

Print the numbers, as the option `acceptance` takes them: those of the embedded pair, or of two
models of one vocabulary. Both are loaded in fp32.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from transformers import AutoTokenizer

from benchmarks.acceptance.calibrate import positional_acceptance
from benchmarks.acceptance.models import load
from benchmarks.acceptance.texts import Prompts, write
from dyntree_plugin.pair import held_out_prompts, target_and_draft

PROMPTS = 32
TOKENS = 64
SEED = 1
"""Other prompts than those that `dyntree bench serve` measures by default."""


def measure(target: str, draft: str) -> list[float]:
    """Return the acceptance rates of a node's children in order, at temperature 0."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    prompts = [tokenizer.encode(text) for text in held_out_prompts(PROMPTS, seed=SEED)]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wanted, given = (load(model, device, torch.float32) for model in (target, draft))
    asked = Prompts.of(prompts, SEED, device)
    text = write(wanted, asked, 0.0, TOKENS)
    found = positional_acceptance(wanted, given, asked, text, 0.0)
    return [round(chance, 4) for chance in found]


def main(models: Sequence[str]) -> None:
    if len(models) not in (0, 2):
        raise SystemExit(__doc__)
    target, draft = models or target_and_draft()
    sys.stdout.write(",".join(map(str, measure(target, draft))) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])

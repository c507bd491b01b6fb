"""The best static tree for a pair: what a dynamic one has to beat at the same budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MAX_DEPTH = 64  # the most that the options allow

_PROMPTS = 32
_TOKENS = 64


def trees(target: str, draft: str, budgets: Sequence[int], seed: int = 1) -> list[dict[str, Any]]:
    """dyntree options of Sequoia's trees (arXiv 2402.12374, section 4.1) of so many nodes.

    How often the target takes a node's first child, its second, … is measured on held-out code, at
    temperature 0; ``seed`` picks other prompts than those that are served by default.
    """
    acceptance = _acceptance(target, draft, seed)
    return [
        {
            "node_budget": nodes,
            "max_depth": min(nodes, MAX_DEPTH),
            "growth": "sequoia",
            "sampling": "best",
            "acceptance": acceptance,
        }
        for nodes in budgets
    ]


def _acceptance(target: str, draft: str, seed: int) -> list[float]:
    import torch
    from transformers import AutoTokenizer

    from dyntree_plugin.bench.acceptance.calibrate import positional_acceptance
    from dyntree_plugin.bench.acceptance.models import load
    from dyntree_plugin.bench.acceptance.texts import Prompts, write
    from dyntree_plugin.pair import held_out_prompts

    tokenizer = AutoTokenizer.from_pretrained(target)
    prompts = [tokenizer.encode(text) for text in held_out_prompts(_PROMPTS, seed=seed)]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wanted, given = (load(model, device, torch.float32) for model in (target, draft))
    asked = Prompts.of(prompts, seed, device)
    text = write(wanted, asked, 0.0, _TOKENS)
    found = positional_acceptance(wanted, given, asked, text, 0.0)
    return [round(chance, 4) for chance in found]

"""Measure how often a target takes its draft's first choice, its second, …, on held-out code.

    python -m benchmarks.positional [TARGET DRAFT]

Print the numbers, as the option `acceptance` takes them: those of the embedded pair, or of two
models of one vocabulary. Both are loaded in fp32, and the target writes at temperature 0.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from dyntree_plugin.options.options import MOST_CHILDREN
from dyntree_plugin.pair import held_out_prompts, target_and_draft

PROMPTS, TOKENS = 32, 64
SEED = 1
"""Other prompts than those that `dyntree bench serve` measures by default."""


@torch.inference_mode()
def shares(
    target: PreTrainedModel, draft: PreTrainedModel, prompts: Sequence[Sequence[int]], tokens: int
) -> list[float]:
    """Return the shares of the target's tokens that the draft ranks first, second, ….

    Sequoia's P (arXiv 2402.12374, section 4.1). It never rises, as Sequoia's dynamic programme
    assumes, and ends before it is 0.
    """
    counts = torch.zeros(MOST_CHILDREN, dtype=torch.float64)
    total = 0
    for prompt in prompts:
        text = target.generate(  # type: ignore[operator]
            torch.tensor([prompt], device=target.device), do_sample=False, max_new_tokens=tokens
        )
        taken = text[0, len(prompt) :].to(draft.device)
        logits = draft(input_ids=text.to(draft.device)).logits[0, len(prompt) - 1 : -1]
        ranks = (logits > logits.gather(1, taken[:, None])).sum(dim=1).cpu()
        counts += ranks[ranks < MOST_CHILDREN].bincount(minlength=MOST_CHILDREN)
        total += len(taken)
    levelled = (counts / total).cummin(0).values
    return [round(share, 4) for share in levelled[levelled > 0].tolist()]


def main(given: Sequence[str]) -> None:
    if len(given) not in (0, 2):
        raise SystemExit(__doc__)
    names = given or target_and_draft()
    tokenizer = AutoTokenizer.from_pretrained(names[0])
    prompts = [tokenizer.encode(text) for text in held_out_prompts(PROMPTS, seed=SEED)]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    models: list[Any] = [
        AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32) for name in names
    ]
    target, draft = (model.to(device).eval() for model in models)
    sys.stdout.write(",".join(map(str, shares(target, draft, prompts, TOKENS))) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])

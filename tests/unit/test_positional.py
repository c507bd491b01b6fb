"""How often a target takes its draft's first, second, … choice, as growth sequoia is told."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM

from benchmarks.pair.models import new_model
from benchmarks.positional import shares
from dyntree_plugin.pair.models import Shape

VOCABULARY, TOKENS = 40, 12
SHAPE = Shape(hidden=32, intermediate=32, layers=1, heads=2, kv_heads=1, head_dim=16)
PROMPTS = [[3, 1, 4, 1], [5, 9], [2, 6, 5, 3, 5]]


def model(noise: float = 0.0) -> LlamaForCausalLM:
    """Return a model with sharp predictions; with ``noise``, one that often agrees with it."""
    made = new_model(SHAPE, VOCABULARY, seed=0).eval()
    generator = torch.Generator().manual_seed(1)
    for weight in made.parameters():
        if weight.dim() == 2:
            spread = weight.std() * torch.randn(weight.shape, generator=generator)
            weight.data.add_(noise * spread).mul_(6)
    return made


def test_a_draft_that_is_the_target_has_every_token_first() -> None:
    assert shares(model(), model(), PROMPTS, TOKENS) == [1.0]


def test_another_draft_has_some_first_and_some_later() -> None:
    target, draft = model(), model(0.3)
    found = shares(target, draft, PROMPTS, TOKENS)
    first = total = 0
    for prompt in PROMPTS:
        text, taken = torch.tensor([prompt]), None
        while text.shape[1] < len(prompt) + TOKENS and taken != target.config.eos_token_id:
            taken = int(target(input_ids=text).logits[0, -1].argmax())
            first += taken == int(draft(input_ids=text).logits[0, -1].argmax())
            total += 1
            text = torch.cat([text, torch.tensor([[taken]])], 1)
    assert 0 < first < total
    assert found[0] == pytest.approx(first / total, abs=1e-4)
    assert found == sorted(found, reverse=True)
    assert len(found) > 1
    assert min(found) > 0
    assert sum(found) <= 1 + 1e-3

"""Tiny random models for the tests of the acceptance laboratory."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from benchmarks.acceptance.models import load
from benchmarks.acceptance.texts import Prompts
from benchmarks.pair.models import new_model
from dyntree_plugin.pair.models import Shape

VOCABULARY = 40
CPU = torch.device("cpu")
SHAPE = Shape(hidden=32, intermediate=48, layers=2, heads=4, kv_heads=2, head_dim=16)


@cache
def plain(noise: float = 0.0) -> LlamaForCausalLM:
    """Return a model with sharp predictions; with ``noise``, one that mostly agrees with it."""
    model = new_model(SHAPE, VOCABULARY, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6)
                spread = parameter.std() * torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise * spread)
    return model


@cache
def in_rows(noise: float = 0.0) -> PreTrainedModel:
    """Return the same model as the laboratory loads it."""
    with TemporaryDirectory() as folder:
        plain(noise).save_pretrained(folder)
        return load(Path(folder), CPU, torch.float32)


def some_prompts(*lengths: int) -> Prompts:
    generator = torch.Generator().manual_seed(2)
    ids = [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
    return Prompts.of(ids, 0, CPU)

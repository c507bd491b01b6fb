"""A cheap pair to interpret: the target is the embedded draft, and the draft is a noisy copy of
it."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from dyntree_plugin import pair

NOISE = 0.1
"""Standard deviation of the noise on the draft's weights, as a share of the weights' own."""


def make_pair(folder: Path) -> tuple[str, str]:
    """Return the folders of the target and of the draft, which is written to ``folder``."""
    target = Path(pair.paths()["draft"])
    draft = folder / "draft"
    shutil.copytree(target, draft)
    weights = load_file(draft / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        noise = torch.randn(weight.shape, generator=generator) * weight.float().std()
        weights[name] = (weight.float() + NOISE * noise).to(weight.dtype)
    save_file(weights, draft / "model.safetensors", {"format": "pt"})
    return str(target), str(draft)

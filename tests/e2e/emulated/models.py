"""A pair that is cheap to interpret: the embedded draft as the target, and a draft that errs."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from dyntree_plugin import pair

NOISE = 0.1
"""Standard deviation of what is added to the draft's weights, as a share of their own."""


def make_pair(folder: Path) -> tuple[str, str]:
    """The folders of the target and of the draft, which is made in ``folder``."""
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

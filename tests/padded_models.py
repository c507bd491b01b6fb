"""Models of the embedded pair with padded embeddings, as models of one family have them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from dyntree_plugin import pair

_EMBEDDING = "model.embed_tokens.weight"


def padded(folder: Path, name: str, size: int, *, likely: bool) -> Path:
    """Write a model of the pair with an embedding of ``size`` rows; return its folder.

    The rows beyond the tokenizer's stand for no token. If ``likely``, the model says them more
    often than any token, else hardly ever, as a trained model does.
    """
    source = pair.paths()[name]
    shutil.copytree(source, folder)
    weights = load_file(source / "model.safetensors")
    rows = weights[_EMBEDDING]
    more = size - len(rows)
    if likely:
        order = rows.float().norm(dim=1).argsort(descending=True)
        added = 2 * rows[order[:more]]
    else:
        generator = torch.Generator().manual_seed(size)
        added = 0.02 * torch.randn(more, rows.shape[1], generator=generator)
    weights[_EMBEDDING] = torch.cat([rows, added.to(rows.dtype)])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": size}))
    return folder

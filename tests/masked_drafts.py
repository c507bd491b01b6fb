"""Drafts of the embedded target that read masks, PARD's and P-EAGLE's, and what they compute.

``left`` leaves a mask in place of the text's last token but one: what a draft would read if the
cache kept a mask's keys and values.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import heads
import torch

from benchmarks.pair import models
from dyntree_plugin import pair

LENGTH = 5
MASK = 3


def pard(folder: Path) -> Path:
    """Write the embedded draft as one that reads masks, which it was not trained for; return its
    folder."""
    shutil.copytree(pair.paths()["draft"], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pard_token": MASK}))
    return folder


def peagle(folder: Path) -> Path:
    """Write an EAGLE-3 head of random weights that reads masks; return its folder."""
    # Its part of the vocabulary has the tokens of `random_engines.FEW`.
    return heads.random_head(folder, seed=14, ptd_token_id=MASK)


class PlainPARD:
    """A stored draft model that reads masks, in transformers."""

    def __init__(self, folder: Path) -> None:
        self._model = models.load(folder)

    @torch.inference_mode()
    def logits(self, text: list[int], path: list[int], left: int = 0) -> torch.Tensor:
        """Return the logits [V] after ``text`` and the nodes of ``path``."""
        read = [*text, *[MASK] * (LENGTH - 1)]
        if left:
            read[len(text) - 2] = MASK
        found: torch.Tensor = self._model(input_ids=torch.tensor([read])).logits
        return found[0, len(text) - 1 + len(path)]


class PlainPEagle(heads.PlainHead):
    """A stored head that reads masks, in plain torch."""

    @torch.inference_mode()
    def logits(self, text: list[int], path: list[int], left: int = 0) -> torch.Tensor:
        """Return the logits [V] after ``text`` and the nodes of ``path``.

        The target has read all of the text but its last token.
        """
        states, tokens = self._states(text), torch.tensor(text[1:])
        mask = self._weights["mask_hidden"].float().flatten() @ self._weight("fc").T
        if left:
            states[-2], tokens[-2] = mask, MASK
        states = torch.cat([states, mask.expand(LENGTH - 1, -1)])
        tokens = torch.cat([tokens, torch.full((LENGTH - 1,), MASK)])
        return self._scores(self._layer(tokens, states)[len(text) - 2 + len(path)])

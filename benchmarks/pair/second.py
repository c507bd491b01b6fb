"""A second draft for a stored pair: the same target, another part of the corpus."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.pair import models, train
from benchmarks.pair.build import add_draft, of_text

NAME = "second_draft"


def add_second_draft(pair: Path, recipe: train.Recipe, **where: Any) -> dict[str, Any]:
    """Distil `pair`/second_draft from `pair`/target, and add it as `add_draft` does.

    Of `recipe`, the vocabulary and the target are the stored pair's and must not differ. `where`:
    what `add_draft` takes by name.
    """

    def make(target: Any, tokens: Any, written: Any, checkpoint: Any) -> LlamaForCausalLM:
        trained = train.distil_draft(target, tokens, written, recipe, checkpoint)
        models.save(trained, PreTrainedTokenizerFast.from_pretrained(pair / "target"), pair / NAME)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(pair / "target" / file, pair / NAME / file)
        return models.load(pair / NAME)

    said = of_text(recipe, "draft", "draft_schedule")
    return add_draft(pair, NAME, recipe, make, said, **where)

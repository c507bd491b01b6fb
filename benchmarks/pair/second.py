"""A second draft for a stored pair: the same target, another part of the corpus."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.pair import evaluate, train
from benchmarks.pair.build import EVALUATION_PROMPTS, add_draft, of_text
from dyntree_plugin.pair import models

NAME = "second_draft"


def add_second_draft(
    pair: Path,
    recipe: train.Recipe,
    *,
    root: Path | None = None,
    checkpoints: Path | None = None,
    prompts: int = EVALUATION_PROMPTS,
) -> dict[str, Any]:
    """Distil `pair`/second_draft from `pair`/target, and add it to the pair's provenance.json.

    Of `recipe`, the vocabulary and the target are the stored pair's and must not differ. `root` and
    `checkpoints` are those of `build`. Returns the new entry of provenance.json.

    Raises:
        ValueError: if the recipe asks for tests and the library has none.
    """

    def make(target: Any, tokens: Any, written: Any, checkpoint: Any) -> LlamaForCausalLM:
        trained = train.distil_draft(target, tokens, written, recipe, checkpoint)
        models.save(trained, PreTrainedTokenizerFast.from_pretrained(pair / "target"), pair / NAME)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(pair / "target" / file, pair / NAME / file)
        return models.load(pair / NAME)

    return add_draft(
        pair, NAME, recipe, make, evaluate.agreement, of_text(recipe, "draft", "draft_schedule"),
        root=root, checkpoints=checkpoints, prompts=prompts,
    )  # fmt: skip

"""A second draft for a stored pair: the same target, another part of the corpus."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from benchmarks.pair import evaluate, train
from benchmarks.pair.build import EVALUATION_PROMPTS, describe, measure
from dyntree_plugin.pair import corpus, models, provenance

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
    started = time.monotonic()
    target = models.load(pair / "target")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(pair / "target")
    sources = corpus.training_sources(root)
    tokens = train.tokenize(sources, tokenizer)
    if recipe.library_share < 1 and len(tokens.tests) <= 2 * recipe.length:
        raise ValueError(
            f"library_share={recipe.library_share} asks for the library's tests, but this Python "
            "is installed without them"
        )
    checkpoint = None
    if checkpoints is not None:
        checkpoints.mkdir(parents=True, exist_ok=True)
        checkpoint = checkpoints / f"{NAME}.ckpt"
    written = train.write_rows(target, tokens, recipe)
    trained = train.distil_draft(target, tokens, written, recipe, checkpoint)
    models.save(trained, tokenizer, pair / NAME)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(pair / "target" / file, pair / NAME / file)
    second = models.load(pair / NAME)

    asked = corpus.held_out_prompts(prompts, root=root)
    agreement = evaluate.agreement(target, second, tokenizer, asked)
    of_recipe = asdict(recipe)
    entry = {
        "corpus": describe(sources, tokens, root),
        "recipe": {
            name: of_recipe[name]
            for name in (
                "length",
                "library_share",
                "draft",
                "draft_schedule",
                "written_rows",
                "written_share",
                "seed",
            )
        },
        **measure(second, tokenizer, root),
        "agreement_on_held_out_prompts": asdict(agreement) | {"prompts": prompts},
        "threads": torch.get_num_threads(),
        "wall_minutes": round((time.monotonic() - started) / 60, 1),
        "command": "python -m benchmarks.pair",
    }
    said = provenance(pair) | {NAME: entry}
    (pair / "provenance.json").write_text(json.dumps(said, indent=2) + "\n")
    return entry

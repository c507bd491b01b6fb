"""From the running interpreter's standard library to a stored pair with its provenance."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.pair import evaluate, models, train
from benchmarks.pair.corpus import is_test, training_sources
from dyntree_plugin.pair import corpus, provenance


def build(
    output: Path,
    recipe: train.Recipe,
    *,
    root: Path | None = None,
    checkpoints: Path | None = None,
) -> dict[str, Any]:
    """Train a pair into `output`/target and `output`/draft; returns what provenance.json says.

    `root` is the library to read, `checkpoints` a directory that an interrupted build resumes
    from; the recipe and the library must then be the same. The same recipe, library, machine and
    number of threads give the same weights.
    """
    started = time.monotonic()
    sources = training_sources(root)
    tokenizer = models.new_tokenizer([s.text for s in sources if not is_test(s)], recipe.vocabulary)
    tokens = train.tokenize(sources, tokenizer)
    if checkpoints is not None:
        checkpoints.mkdir(parents=True, exist_ok=True)

    def checkpoint(name: str) -> Path | None:
        return None if checkpoints is None else checkpoints / f"{name}.ckpt"

    trained = train.train_target(tokens, recipe, checkpoint("target"))
    models.save(trained, tokenizer, output / "target")
    target = models.load(output / "target")
    written = train.write_rows(target, tokens, recipe)
    trained = train.distil_draft(target, tokens, written, recipe, checkpoint("draft"))
    models.save(trained, tokenizer, output / "draft")
    draft = models.load(output / "draft")
    said = {
        "corpus": describe(sources, tokens, root),
        "held_out": list(corpus.HELD_OUT),
        "recipe": asdict(recipe),
        "target": measure(target, tokenizer, root),
        "draft": measure(draft, tokenizer, root),
        "versions": {name: version(name) for name in ("torch", "transformers", "tokenizers")},
        "threads": torch.get_num_threads(),
        "wall_minutes": round((time.monotonic() - started) / 60, 1),
        "command": "python -m benchmarks.pair",
    }
    (output / "provenance.json").write_text(json.dumps(said, indent=2) + "\n")
    return said


def add_draft(
    pair: Path,
    name: str,
    text: train.Recipe,
    make: Callable[..., Any],
    said: dict[str, Any],
    *,
    root: Path | None = None,
    checkpoints: Path | None = None,
) -> dict[str, Any]:
    """Make a draft `name` for `pair`/target, and add it to the pair's provenance.json.

    `make` trains, stores and loads the draft; it takes the target, the tokens, the rows that the
    target has written, and the file of the checkpoint. `said` is the recipe in the new entry of
    provenance.json, which is returned. `root` and `checkpoints` are those of `build`.

    Raises:
        ValueError: if `text` asks for tests and the library has none.
    """
    started = time.monotonic()
    target = models.load(pair / "target")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(pair / "target")
    sources = training_sources(root)
    tokens = train.tokenize(sources, tokenizer)
    if text.library_share < 1 and len(tokens.tests) <= 2 * text.length:
        raise ValueError(
            f"library_share={text.library_share} asks for the library's tests, but this Python is "
            "installed without them"
        )
    checkpoint = None
    if checkpoints is not None:
        checkpoints.mkdir(parents=True, exist_ok=True)
        checkpoint = checkpoints / f"{name}.ckpt"
    written = train.write_rows(target, tokens, text)
    draft = make(target, tokens, written, checkpoint)
    entry = {
        "corpus": describe(sources, tokens, root),
        "recipe": said,
        **(
            measure(draft, tokenizer, root)
            if isinstance(draft, LlamaForCausalLM)
            else {"parameters": models.parameter_count(draft)}
        ),
        "threads": torch.get_num_threads(),
        "wall_minutes": round((time.monotonic() - started) / 60, 1),
        "command": "python -m benchmarks.pair",
    }
    said = provenance(pair) | {name: entry}
    (pair / "provenance.json").write_text(json.dumps(said, indent=2) + "\n")
    return entry


def of_text(recipe: train.Recipe, *more: str) -> dict[str, Any]:
    """Return what counts of a draft's recipe, for provenance.json: its text, and `more` fields."""
    names = ("length", "library_share", *more, "written_rows", "written_share", "seed")
    return {name: asdict(recipe)[name] for name in names}


def describe(
    sources: list[corpus.Source], tokens: train.Tokens, root: Path | None
) -> dict[str, Any]:
    """Return what there is to read, for provenance.json."""
    return {
        "text": "The Python standard library and its tests",
        "licence": "Python Software Foundation License Version 2",
        "python": platform.python_version() if root is None else None,
        "files": len(sources),
        "bytes": sum(len(source.text.encode()) for source in sources),
        "tokens_of_library": len(tokens.library),
        "tokens_of_tests": len(tokens.tests),
    }


def measure(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, root: Path | None
) -> dict[str, Any]:
    """Return the model's size and its losses on the held-out modules, for provenance.json."""
    texts = [source.text for source in corpus.held_out_sources(root)]
    loss = evaluate.held_out_loss(model, tokenizer, texts)
    return {
        "parameters": models.parameter_count(model),
        "held_out_nats_per_token": round(loss.nats_per_token, 4),
        "held_out_bits_per_byte": round(loss.bits_per_byte, 4),
    }

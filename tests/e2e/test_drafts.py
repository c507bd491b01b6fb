"""Several drafts in one engine: each reads the same text as if it were alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pooled
import pytest
import torch
import workload
from engine_process import answered
from transformers import AutoTokenizer

from dyntree_plugin import pair
from dyntree_plugin.pair import models

pytestmark = pytest.mark.e2e

PROMPTS = 3
DRAFTS = ("draft", "second_draft", "target")
"""Two of one shape, and one with other layers, heads and channels."""


@dataclass(frozen=True)
class Pooled:
    """What an engine with `DRAFTS` did. ``notes`` pairs texts with the drafts' logits there."""

    groups: list[list[str]]
    drafts: list[str]
    texts: list[list[int]]
    notes: list[pooled.Note]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Pooled:
    notes = tmp_path_factory.mktemp("pooled") / "notes"
    tokenizer = AutoTokenizer.from_pretrained(pair.paths()["target"])
    arguments = workload.tree(drafts=[str(pair.paths()[name]) for name in DRAFTS[1:]])
    job: dict[str, Any] = {
        "arguments": arguments,
        "prompts": [tokenizer.encode(text) for text in pair.held_out_prompts(PROMPTS, seed=2)],
        "notes": str(notes),
    }
    found = answered(str(Path(pooled.__file__)), job, {}, threads=1)
    return Pooled(**found, notes=torch.load(notes))


def alone(name: str, notes: list[pooled.Note]) -> torch.Tensor:
    """Return the logits of a draft that runs by itself on the noted texts, [texts, vocabulary]."""
    model = models.load(pair.paths()[name])
    with torch.inference_mode():
        return torch.stack(
            [model(input_ids=torch.tensor([text + path])).logits[0, -1] for text, path, _ in notes]
        )


def test_the_layers_of_all_models_share_a_cache_group(engine: Pooled) -> None:
    (group,) = engine.groups
    of_drafts = {name for name in group if name.startswith("draft_model")}
    assert of_drafts == {*engine.drafts} < {*group}
    prefixes = {name.split(".")[0] for name in of_drafts}
    assert prefixes == {"draft_model", "draft_model_2", "draft_model_3"}


@pytest.mark.parametrize("name", DRAFTS)
def test_each_draft_says_what_it_says_alone(engine: Pooled, name: str) -> None:
    """At the roots and at the nodes that drafting expands."""
    number = DRAFTS.index(name)
    notes = engine.notes[::5]
    wanted = alone(name, notes)
    found = torch.stack([logits[number] for _, _, logits in notes])
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-3)
    # Control: another draft says something else.
    other = torch.stack([logits[number - 1] for _, _, logits in notes])
    assert float((other - wanted).abs().mean()) > 0.1


def test_what_was_noted_goes_beyond_the_roots(engine: Pooled) -> None:
    """Control of the tests above."""
    written = [tuple(text) for text in engine.texts]
    assert all(len(text) > pooled.TOKENS + 40 for text in written)

    def on_the_way(text: list[int]) -> bool:
        return any(tuple(text) == each[: len(text)] for each in written)

    there = [on_the_way(text + path) for text, path, _ in engine.notes]
    assert 30 < sum(there) < len(there) - 100


def test_several_drafts_change_no_output(engine: Pooled) -> None:
    model = models.load(pair.paths()["target"])
    for text in engine.texts:
        start = len(text) - pooled.TOKENS
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([text])).logits[0, start - 1 : -1]
        chosen = logits.gather(1, torch.tensor(text[start:])[:, None])[:, 0]
        # Two tokens may be equally good but for rounding.
        assert float((logits.amax(1) - chosen).max()) < 1e-3

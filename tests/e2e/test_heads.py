"""Heads of the target: each row reads the hidden state, the tokens and the keys that it should."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import heads
import pooled
import pytest
import torch
import workload
from engine_process import answered
from slow import marked
from transformers import AutoTokenizer

from dyntree_plugin import pair
from dyntree_plugin.pair import models

pytestmark = pytest.mark.e2e

HEADS = {
    "random": heads.random_head,
    "mirror": heads.mirror_head,
    "EAGLE's first mirror": heads.first_eagle_mirror,
    "MTP mirror": heads.mtp_mirror,
}
METHODS = {"EAGLE's first mirror": "eagle", "MTP mirror": "mtp"}
MIRRORS = [name for name in HEADS if "mirror" in name]
OF_EAGLE3 = ("random", "mirror")
SLOW_HEADS = {"mirror", "EAGLE's first mirror"}


@dataclass(frozen=True)
class Headed:
    """What an engine with a head did. ``notes`` pairs texts and paths with the head's logits."""

    head: Path
    texts: list[list[int]]
    notes: list[pooled.Note]


Engine = Callable[[str], Headed]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Return a function that gives what an engine with this head did."""

    @cache
    def run(name: str) -> Headed:
        folder = tmp_path_factory.mktemp(name)
        head = HEADS[name](folder / "head")
        tokenizer = AutoTokenizer.from_pretrained(pair.paths()["target"])
        job: dict[str, Any] = {
            "arguments": workload.with_head(head, METHODS.get(name, "eagle3"), budget="fixed"),
            "prompts": [tokenizer.encode(text) for text in pair.held_out_prompts(4, seed=2)],
            "notes": str(folder / "notes"),
        }
        found = answered(str(Path(pooled.__file__)), job, {}, threads=1)
        return Headed(head, found["texts"], torch.load(folder / "notes"))

    return run


def wanted(head: Path, notes: list[pooled.Note]) -> torch.Tensor:
    """Return the logits of the same head in plain torch, [notes, vocabulary]."""
    plain = heads.PlainHead(head)
    return torch.stack([plain.logits(text, path) for text, path, _ in notes])


@pytest.mark.parametrize("name", marked(OF_EAGLE3, SLOW_HEADS))
def test_every_row_says_what_the_head_says_alone(name: str, engine: Engine) -> None:
    """At the roots, after prompts in chunks and after accepted paths, and at expanded nodes."""
    run = engine(name)
    notes = run.notes[::31]
    found = torch.stack([logits[0] for _, _, logits in notes])
    alone = wanted(run.head, notes)
    assert torch.equal(found == -torch.inf, alone == -torch.inf)
    reached = alone > -torch.inf
    torch.testing.assert_close(found[reached], alone[reached], rtol=0, atol=2e-3)
    assert max(len(path) for _, path, _ in notes) > 2


@pytest.mark.parametrize("name", marked(OF_EAGLE3, SLOW_HEADS))
def test_a_state_of_another_place_is_seen(name: str, engine: Engine) -> None:
    """Control: without the text's last token the head says something else."""
    run = engine(name)
    notes = [note for note in run.notes[::41] if not note[1]]
    found = torch.stack([logits[0] for _, _, logits in notes])
    shifted = wanted(run.head, [(text[:-1], [], logits) for text, _, logits in notes])
    reached = shifted > -torch.inf
    assert float((found[reached] - shifted[reached]).abs().mean()) > 0.1


@pytest.mark.parametrize("name", marked(MIRRORS, SLOW_HEADS))
def test_a_mirror_repeats_the_last_token(name: str, engine: Engine) -> None:
    """The target's own state before the root makes the root's token the head's choice."""
    run = engine(name)
    whole = {tuple(text) for text in run.texts}
    written = [
        (text, path, logits)
        for text, path, logits in run.notes
        if any(each[: len(text)] == tuple(text) and len(text) > len(each) - 20 for each in whole)
    ]
    assert len(written) > 100
    assert any(path for _, path, _ in written)
    assert all(int(logits[0].argmax()) == text[-1] for text, _, logits in written)


@pytest.mark.parametrize("name", marked(HEADS, SLOW_HEADS))
def test_a_head_changes_no_output(name: str, engine: Engine) -> None:
    run = engine(name)
    target = models.load(pair.paths()["target"])
    for text in run.texts:
        start = len(text) - pooled.TOKENS
        with torch.inference_mode():
            logits = target(input_ids=torch.tensor([text])).logits[0, start - 1 : -1]
        chosen = logits.gather(1, torch.tensor(text[start:])[:, None])[:, 0]
        # Two tokens may be equally good but for rounding.
        assert float((logits.amax(1) - chosen).max()) < 1e-3

"""Drafts of every kind: each row of logits is what the draft says alone after a text and a path."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import blocks
import heads
import pooled
import pytest
import torch
import workload
from block_engines import PLAIN, block_engine
from engine_process import answered
from random_engines import FEW, NODES
from random_targets import WINDOWED, changed_copy, gemma4_assistant, random_target
from slow import marked
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.pair import models
from dyntree_plugin import pair

pytestmark = pytest.mark.e2e

Alone = Callable[..., torch.Tensor]
"""Gives a draft's logits [V] after a text and a path, of which the target has read all of the text
but its last token."""


@dataclass(frozen=True)
class Source:
    """Arguments of an engine, and what each of its drafts says ``alone``.

    ``params`` are those of the requests, whose prompts have ``keep`` tokens and come ``times``.
    """

    arguments: dict[str, Any]
    alone: list[Alone]
    params: dict[str, Any] = field(default_factory=dict)
    keep: int | None = None
    times: int = 1


@dataclass(frozen=True)
class Spoken:
    """What an engine did. ``notes`` pairs texts and paths with the drafts' logits there."""

    source: Source
    groups: list[list[str]]
    drafts: list[str]
    texts: list[list[int]]
    cached: int
    preemptions: float
    notes: list[pooled.Note]

    def apart(self, notes: Iterable[pooled.Note], number: int = 0, **changes: Any) -> torch.Tensor:
        """Return how far a draft's logits are from what it says alone, [notes]."""
        found = []
        for text, path, logits in notes:
            alone = self.source.alone[number](text, path, **changes)
            reached = alone > -torch.inf  # A head may have a part of the vocabulary.
            found.append((logits[number][reached] - alone[reached]).abs().max())
        return torch.stack(found)


DRAFTS = ("draft", "second_draft", "target")
"""Two of one shape, and one with other layers, heads and channels."""


@torch.inference_mode()
def _says(model: Any, text: list[int], path: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=torch.tensor([text + path])).logits[0, -1]
    return logits


def _pool(folder: Path) -> Source:
    arguments = workload.tree(drafts=[str(pair.paths()[name]) for name in DRAFTS[1:]])
    return Source(arguments, [partial(_says, models.load(pair.paths()[name])) for name in DRAFTS])


def _windowed(folder: Path) -> Source:
    """A draft model with windows. It says something else where it sees the ``whole`` text."""
    wide = pair.paths()["draft"]
    layers = json.loads((wide / "config.json").read_text())["num_hidden_layers"]
    windows = {"sliding_window": 32, "layer_types": ["sliding_attention"] * layers}
    of_mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    draft = changed_copy(wide, folder / "draft", **of_mistral, **windows)
    load = partial(AutoModelForCausalLM.from_pretrained, dtype=torch.float32)
    loaded = load(draft), load(wide)
    arguments = workload.tree()
    arguments["speculative_config"]["model"] = str(draft)
    return Source(arguments, [lambda text, path, whole=0: _says(loaded[whole], text, path)])


def _head(make: Callable[[Path], Path], method: str, folder: Path) -> Source:
    head = make(folder / "head")
    alone: list[Alone] = [heads.PlainHead(head).logits] if method == "eagle3" else []
    return Source(workload.with_head(head, method, budget="fixed"), alone)


def _chain(folder: Path) -> Source:
    """vLLM's own chain, with memory for two of its requests. They are asked again."""
    head = heads.random_head(folder, attends=4.0)
    speculation = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 4}
    tight = {"block_size": 32, "num_gpu_blocks_override": 12}
    arguments = workload.without_tree(speculative_config=speculation, **tight)
    return Source(arguments, [heads.PlainHead(head).logits], {"max_tokens": 60}, keep=90, times=2)


def _block(kind: str, folder: Path) -> Source:
    arguments = block_engine(kind, folder / "draft")(budget="fixed")
    return Source(arguments, [PLAIN[kind](folder / "draft").logits])


def _gemma4(folder: Path) -> Source:
    target = random_target(folder / "target", "gemma4_text")
    module = gemma4_assistant(folder / "module")
    arguments = workload.with_head(module, "gemma4_mtp", NODES, budget="fixed")
    alone = _Gemma4(target, module).logits
    params = FEW | {"max_tokens": pooled.TOKENS}
    return Source(arguments | {"model": str(target)}, [alone], params, keep=90)


class _Gemma4:
    """Target and module in transformers, which run over one text as their authors define them."""

    def __init__(self, *folders: Path) -> None:
        self._target, self._module = map(AutoModelForCausalLM.from_pretrained, folders)

    @torch.inference_mode()
    def logits(self, text: list[int], path: list[int], advance: int = 0) -> torch.Tensor:
        """A node stands ``advance`` positions after its parent."""
        read = self._target.model(torch.tensor([text[:-1]]), return_shared_kv_states=True)
        state, position = read.last_hidden_state[:, -1:], torch.tensor([[len(text) - 2]])
        window = WINDOWED["gemma4_text"]["sliding_window"]
        caches = {
            kind: [each[:, :, -window:] if kind == "sliding_attention" else each for each in cache]
            for kind, cache in read.shared_kv_states.items()
        }
        for token in (text[-1], *path):
            embedded = self._target.get_input_embeddings()(torch.tensor([[token]]))
            found = self._module(
                inputs_embeds=torch.cat([embedded, state], dim=-1),
                position_ids=position,
                shared_kv_states=caches,
            )
            state, position = found.last_hidden_state, position + advance
        logits: torch.Tensor = found.logits[0, 0]
        return logits


SOURCES: dict[str, Callable[[Path], Source]] = {
    "pool": _pool,
    "windowed draft": _windowed,
    "random head": partial(_head, heads.random_head, "eagle3"),
    "mirror": partial(_head, heads.mirror_head, "eagle3"),
    "EAGLE's first mirror": partial(_head, heads.first_eagle_mirror, "eagle"),
    "MTP mirror": partial(_head, heads.mtp_mirror, "mtp"),
    "Gemma-4's module": _gemma4,
    "vLLM's chain": _chain,
    **{kind: partial(_block, kind) for kind in PLAIN},
}
SLOW = {"mirror", "vLLM's chain", "EAGLE's first mirror", *blocks.KINDS[1:], "P-EAGLE"}
ALONE = [name for name in SOURCES if name not in ("EAGLE's first mirror", "MTP mirror")]
Served = Callable[[str], Spoken]


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Return a function that gives what the engine with a source did."""

    @cache
    def run(name: str) -> Spoken:
        folder = tmp_path_factory.mktemp("drafts")
        source = SOURCES[name](folder)
        encode = AutoTokenizer.from_pretrained(pair.paths()["target"]).encode
        prompts = [encode(text)[: source.keep] for text in pair.held_out_prompts(4, seed=2)]
        job: dict[str, Any] = {
            "arguments": source.arguments,
            "prompts": [each for each in prompts for _ in range(source.times)],
            "notes": str(folder / "notes"),
            "params": source.params,
        }
        found = answered(str(Path(pooled.__file__)), job, {}, threads=1)
        return Spoken(source, **found, notes=torch.load(folder / "notes"))

    return run


@pytest.mark.parametrize("name", marked(ALONE, SLOW))
def test_every_row_says_what_the_draft_says_alone(name: str, spoken: Served) -> None:
    """At the roots, after prompts in chunks and after accepted paths, and at expanded nodes.

    Control: without the text's last token, and in a pool, another draft says something else.
    """
    own = spoken(name)
    notes = own.notes[::23]
    lengths = {len(path) for _, path, _ in notes}
    assert 0 in lengths
    assert max(lengths) > 2
    shifted = [(text[:-1], path, logits) for text, path, logits in notes]
    for number, alone in enumerate(own.source.alone):
        assert float(own.apart(notes, number).max()) < 2e-3
        assert float(own.apart(shifted, number).mean()) > 0.1
        for text, path, logits in notes[:5]:
            hidden = alone(text, path) == -torch.inf
            assert torch.equal(logits[number] == -torch.inf, hidden)
    if len(own.source.alone) > 1:
        others = [(text, path, logits[1:] + logits[:1]) for text, path, logits in notes]
        assert float(own.apart(others).mean()) > 0.1


@pytest.mark.slow
@torch.inference_mode()
def test_vllms_chain_reads_the_prefix_cache_and_goes_on_after_preemption(spoken: Served) -> None:
    """Its rows are right, as above, and its tokens the target's. Controls: without a block of the
    text the head says something else, and the target another token."""
    own, target = spoken("vLLM's chain"), models.load(pair.paths()["target"])
    assert min(own.cached, own.preemptions) > 0
    notes = [(text[32:], *rest) for text, *rest in own.notes[::23]]
    assert float(own.apart(notes).min()) > 1e-2
    for text in own.texts:
        said, without = (
            target(input_ids=torch.tensor([text[lost:]])).logits[0, 89 - lost : -1].argmax(dim=1)
            for lost in (0, 32)
        )
        assert said.tolist() == text[90:] != without.tolist()


@pytest.mark.parametrize(
    ("name", "wrong"),
    marked(
        [
            *((of, wrong) for of in blocks.KINDS for wrong in ("deeper", "causal", "stale")),
            *((of, wrong) for of in ("PARD", "P-EAGLE") for wrong in ("deeper", "left")),
            ("Gemma-4's module", "advance"),
            ("windowed draft", "whole"),
        ],
        SLOW,
    ),
)
def test_what_a_row_reads_is_seen(name: str, wrong: str, spoken: Served) -> None:
    """Control: with the next position, with causal bits, without the context's last token, with a
    mask left in its place, and without its windows the draft alone says something else."""
    own, deeper = spoken(name), [0] * (wrong == "deeper")
    notes = [(text, [*path, *deeper], logits) for text, path, logits in own.notes[::97]]
    if wrong in ("advance", "whole"):  # The first moves nodes alone.
        notes = [note for note in notes if note[1]]
        assert float(own.apart(notes, **{wrong: 1}).mean()) > 0.01
        return
    notes = [note for note in notes if len(note[1]) < blocks.LENGTH]
    changes = {} if deeper else {wrong: 1}
    # One row of P-EAGLE's random head differs by 0.009; sound rows differ by less than 0.002.
    assert float(own.apart(notes, **changes).min()) > (5e-3 if name == "P-EAGLE" else 1e-2)


@pytest.mark.parametrize("name", marked([each for each in SOURCES if "mirror" in each], SLOW))
def test_a_mirror_repeats_the_last_token(name: str, spoken: Served) -> None:
    """The target's own state before the root makes the root's token the head's choice."""
    own = spoken(name)
    whole = {tuple(text) for text in own.texts}
    written = [
        (text, path, logits)
        for text, path, logits in own.notes
        if any(each[: len(text)] == tuple(text) and len(text) > len(each) - 20 for each in whole)
    ]
    assert len(written) > 100
    assert any(path for _, path, _ in written)
    assert all(int(logits[0].argmax()) == text[-1] for text, _, logits in written)


def test_the_layers_of_all_models_share_a_cache_group(spoken: Served) -> None:
    own = spoken("pool")
    (group,) = own.groups
    of_drafts = {name for name in group if name.startswith("draft_model")}
    assert of_drafts == {*own.drafts} < {*group}
    prefixes = {name.split(".")[0] for name in of_drafts}
    assert prefixes == {"draft_model", "draft_model_2", "draft_model_3"}

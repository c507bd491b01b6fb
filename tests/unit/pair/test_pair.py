from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from benchmarks.pair import block as dflash
from benchmarks.pair import evaluate, models, train, train_block, train_head
from benchmarks.pair.build import build
from benchmarks.pair.corpus import training_sources
from benchmarks.pair.second import add_second_draft
from dyntree_plugin import pair
from dyntree_plugin.pair import corpus
from dyntree_plugin.pair.models import Shape
from dyntree_plugin.tune import eagle

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

TOY = train.Recipe(
    vocabulary=300,
    length=16,
    target=Shape(hidden=32, intermediate=32, layers=2, heads=1, kv_heads=1),
    draft=Shape(hidden=16, intermediate=16, layers=1, heads=1, kv_heads=1),
    target_schedule=train.Schedule(steps=6, peak=5e-3, rows=2, warmup=1),
    draft_schedule=train.Schedule(steps=6, peak=5e-3, rows=2, warmup=1),
    written_rows=5,
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(pair.paths()["target"])


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return models.load(pair.paths()["target"])


@pytest.fixture(scope="module")
def draft() -> LlamaForCausalLM:
    return models.load(pair.paths()["draft"])


@pytest.fixture(scope="module")
def second() -> LlamaForCausalLM:
    return models.load(pair.paths()["second_draft"])


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small library: three modules and a test to train on, and short held-out modules."""
    root = tmp_path_factory.mktemp("library")
    for name in ("abc.py", "keyword.py", "copy.py"):
        shutil.copy(corpus.library_root() / name, root / name)
    for source in corpus.held_out_sources():
        (root / source.name).write_text(source.text[:4000], encoding="utf-8")
    (root / "test").mkdir()
    shutil.copy(corpus.library_root() / "contextlib.py", root / "test" / "test_contextlib.py")
    (root / "test" / "test_heapq.py").write_text("secret = 'of the held-out heapq'\n")
    return root


@pytest.mark.parametrize("name", ["draft", "second_draft"])
def test_both_models_share_one_tokenizer_that_restores_any_text(
    name: str, tokenizer: PreTrainedTokenizerFast, target: LlamaForCausalLM
) -> None:
    draft = models.load(pair.paths()[name])
    other = AutoTokenizer.from_pretrained(pair.paths()[name])
    assert tokenizer.get_vocab() == other.get_vocab()
    assert len(tokenizer) == target.config.vocab_size == draft.config.vocab_size
    assert target.config.head_dim % 32 == draft.config.head_dim % 32 == 0
    text = "def größe(x):\n\treturn '→', x  # 漢字\r\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer(text)["input_ids"] == other(text)["input_ids"]


def test_training_never_sees_a_held_out_module_or_its_tests() -> None:
    assert pair.provenance()["held_out"] == list(corpus.HELD_OUT)
    sources = training_sources()
    assert sources
    stems = {Path(source.name).stem for source in sources}
    for module in corpus.HELD_OUT:
        assert not {module, f"test_{module}"} & stems
    trained_on = {source.text for source in sources}
    assert not trained_on & {source.text for source in corpus.held_out_sources()}


def test_held_out_files_are_left_out_wherever_the_library_lies(library: Path) -> None:
    names = [source.name for source in training_sources(library)]
    assert names == ["abc.py", "copy.py", "keyword.py", "test/test_contextlib.py"]
    # Control: the files exist, and only the rule excludes them.
    assert (library / "test" / "test_heapq.py").exists()


def test_the_loss_on_held_out_modules_is_what_the_provenance_says(
    tokenizer: PreTrainedTokenizerFast,
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    second: LlamaForCausalLM,
) -> None:
    texts = [source.text for source in corpus.held_out_sources()]
    random = models.new_model(models.TARGET, len(tokenizer), seed=1).eval()
    known = pair.provenance()
    for model, name in ((target, "target"), (draft, "draft"), (second, "second_draft")):
        loss = evaluate.held_out_loss(model, tokenizer, texts, rows=48)
        # 48 of about 700 rows: the standard error is about 0.05, and modules differ by release.
        assert loss.nats_per_token == pytest.approx(
            known[name]["held_out_nats_per_token"], abs=0.25
        )
    # Control: untrained weights are no better than a uniform guess.
    untrained = evaluate.held_out_loss(random, tokenizer, texts, rows=8)
    assert untrained.nats_per_token > known["target"]["held_out_nats_per_token"] + 2


def test_prompts_are_deterministic_disjoint_and_of_useful_length(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    prompts = corpus.held_out_prompts(250, seed=3)
    assert prompts == corpus.held_out_prompts(250, seed=3)
    assert prompts[:40] == corpus.held_out_prompts(40, seed=3)
    assert set(prompts) != set(corpus.held_out_prompts(250, seed=4))
    assert len(set(prompts)) == 250
    lengths = [len(tokenizer(prompt)["input_ids"]) for prompt in prompts]
    assert min(lengths) >= 30
    assert max(lengths) <= 200
    held_out = [source.text for source in corpus.held_out_sources()]
    for prompt in prompts:
        assert any(prompt + "\n" in text for text in held_out)
    # Modules take turns, so a few prompts already come from many modules.
    assert len({next(i for i, t in enumerate(held_out) if p in t) for p in prompts[:25]}) > 20


def test_a_toy_pair_trains_from_text_to_stored_models(library: Path, tmp_path: Path) -> None:
    said = build(tmp_path, TOY, root=library)
    directories = pair.paths(tmp_path)
    assert json.loads((tmp_path / "provenance.json").read_text()) == json.loads(json.dumps(said))
    assert models.parameter_count(models.load(directories["draft"])) == said["draft"]["parameters"]
    assert len(AutoTokenizer.from_pretrained(directories["target"])) == TOY.vocabulary
    assert str(tmp_path) not in (tmp_path / "provenance.json").read_text()


ADDED: dict[str, Callable[..., dict[str, Any]]] = {
    "second_draft": partial(add_second_draft, recipe=replace(TOY, library_share=0.0, seed=1)),
    "eagle3": partial(
        train_head.add_head,
        recipe=train_head.HeadRecipe(
            text=TOY, head=replace(TOY.target, layers=1), layers=(0, 1), vocabulary=100,
            schedule=TOY.target_schedule,
        ),
    ),
    "dflash": partial(
        train_block.add_block,
        recipe=train_block.BlockRecipe(
            text=TOY, block=replace(TOY.target, layers=2), layers=(1,), block_size=4, roots=3,
            schedule=TOY.target_schedule,
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ADDED)
def test_a_toy_draft_is_added_beside_the_first(name: str, library: Path, tmp_path: Path) -> None:
    build(tmp_path, TOY, root=library)
    assert name not in pair.paths(tmp_path)
    before = {p: p.read_bytes() for n in ("target", "draft") for p in (tmp_path / n).iterdir()}
    first = pair.provenance(tmp_path)
    said = ADDED[name](tmp_path, root=library)
    assert {path: path.read_bytes() for path in before} == before
    assert pair.provenance(tmp_path) == first | {name: json.loads(json.dumps(said))}
    assert str(tmp_path) not in (tmp_path / "provenance.json").read_text()
    folder = pair.paths(tmp_path)[name]
    if name == "second_draft":
        draft: torch.nn.Module = models.load(folder)
        others = load_file(tmp_path / "draft" / "model.safetensors")
        weights = load_file(folder / "model.safetensors")
        assert not all(torch.equal(weight, others[name]) for name, weight in weights.items())
        for file in ("tokenizer.json", "tokenizer_config.json"):
            assert (folder / file).read_bytes() == (tmp_path / "target" / file).read_bytes()
    elif name == "eagle3":
        draft = eagle.load_head(folder)
        assert len(draft.tokens) == 100
    else:
        embedding = models.load(tmp_path / "target").get_input_embeddings().weight
        draft = dflash.load_block(folder, embedding)
    assert models.parameter_count(draft) == said["parameters"]


def test_training_is_repeatable_and_depends_on_the_seed(library: Path) -> None:
    sources = training_sources(library)
    tokenizer = models.new_tokenizer([source.text for source in sources], TOY.vocabulary)
    tokens = train.tokenize(sources, tokenizer)

    def weights(recipe: train.Recipe) -> torch.Tensor:
        target = train.train_target(tokens, recipe)
        written = train.write_rows(target, tokens, recipe)
        draft = train.distil_draft(target, tokens, written, recipe)
        return torch.cat([p.detach().flatten() for m in (target, draft) for p in m.parameters()])

    first = weights(TOY)
    assert torch.equal(first, weights(TOY))
    assert not torch.equal(first, weights(replace(TOY, seed=1)))

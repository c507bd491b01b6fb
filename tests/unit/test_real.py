"""The comparison of published models: what needs neither a model nor an engine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from benchmarks.real import answers, judge, models, prompts, report
from benchmarks.real.answers import Answered, first_difference
from dyntree_plugin.commands.loads.load import Load
from dyntree_plugin.commands.loads.requests import Request
from dyntree_plugin.tree.perturb import perturb_on


def tokenizer(template: str | None = "{{ messages[0]['content'] }}") -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes, and of one space with another."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: at for at, token in enumerate([*letters, "ĠĠ", "<bos>"])}
    made = Tokenizer(BPE(vocabulary, [("Ġ", "Ġ")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    found = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<bos>")
    found.chat_template = template
    return found


@pytest.mark.parametrize(
    ("model", "found"),
    [("smollm2", "digits are not split"), ("gemma3", "a text begins with 'I' instead of '<bos>'")],
)
def test_what_a_tokenizer_lost_is_named_and_mended(model: str, found: str, tmp_path: Path) -> None:
    lost = tokenizer()
    assert [*models.problems(models.MODELS[model], lost)] == [found]
    models.mend(models.MODELS[model], lost)
    lost.save_pretrained(tmp_path)
    read = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert [*models.problems(models.MODELS[model], read)] == []


def test_a_lost_chat_template_is_named() -> None:
    mended = tokenizer(None)
    models.mend(models.MODELS["smollm2"], mended)
    assert [*models.problems(models.MODELS["smollm2"], mended)] == ["there is no chat template"]


def test_a_prompt_has_its_page_and_its_schema(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("A long page")
    lines = [
        {"kind": "quotes", "prompt": "Quote.", "page": "page.md", "characters": 6},
        {"kind": "JSON", "prompt": "Answer.", "schema": {"type": "object"}},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    quote, answer = prompts.read(file, tmp_path)
    assert (quote.text, quote.sampling) == ("Quote.\n\nA long", {})
    assert answer.sampling == {"structured_outputs": {"json": {"type": "object"}}}


def test_our_prompts_are_asked_with_every_variant_and_other_seeds_in_each_round() -> None:
    read = prompts.read()
    kinds = [prompt.kind for prompt in read]
    assert {kind: kinds.count(kind) for kind in kinds} == dict.fromkeys(kinds, 12)
    found = prompts.parts(read, tokenizer(), rounds=2)
    assert sum(len(part.load.requests) for part in found) >= 1000
    assert len({part.name for part in found}) == len(found)
    first, *_, last = found
    assert first.load.seed != last.load.seed
    alone = [first.scores_alone(number) for number in range(len(first.load.requests))]
    assert sum(alone) == 12 < len(alone)
    assert not last.scores_alone(0)  # a grammar decides, too


@pytest.mark.parametrize(
    ("plain", "other", "place"),
    [([1, 2], [1, 2], None), ([1, 2, 3], [1, 5, 3], 1), ([1, 2], [1, 2, 3], 2), ([1], [], 0)],
)
def test_the_end_of_the_shorter_answer_is_a_difference(
    plain: list[int], other: list[int], place: int | None
) -> None:
    assert first_difference(plain, other) == place


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_moving_a_logit_by_the_gap_exchanges_the_tokens(temperature: float) -> None:
    logits = torch.randn(5, generator=torch.Generator().manual_seed(3))

    def ranking(scores: torch.Tensor) -> list[int]:
        drawn = perturb_on(scores.device)(
            scores[None], torch.tensor([temperature]), torch.tensor([7]), torch.tensor([11])
        )
        return [int(token) for token in drawn[0].argsort(descending=True)]

    first, second, *_ = ranking(logits)
    gap = judge.gap(logits, (first, second), temperature, 7, 11)
    moved = logits.clone()
    moved[second] += gap - 1e-3
    assert ranking(moved)[0] == first
    moved[second] += 2e-3
    assert ranking(moved)[0] == second


class Scores(judge.Reference):
    """Scores in which token 1 leads token 0 by ``lead``, and token 0 all others by 1."""

    def __init__(self, lead: float) -> None:
        self.lead = lead

    def logits(self, tokens: Sequence[int], last: int) -> torch.Tensor:
        return torch.tensor([[0.0, self.lead, -1.0, -1.0]]).expand(last, -1)


def a_part(*samplings: Mapping[str, Any]) -> prompts.Part:
    requests = [Request([3, 3], {"ignore_eos": False, **each}) for each in samplings]
    return prompts.Part("chat", 0.0, 0, Load(requests, 1, 0.0, 4))


def answered(plain: Sequence[Sequence[int]], trees: Sequence[Sequence[int]]) -> Answered:
    return Answered(a_part().name, plain, trees, 4, (1.0, 2.0))


@pytest.mark.parametrize(
    ("lead", "sampling", "margin", "ties"),
    [(0.001, {}, 0.01, 1), (0.5, {}, 0.01, 0), (0.001, {"top_p": 0.9}, 0.01, 0), (0.0, {}, 0.0, 0)],
)
def test_only_a_small_gap_that_is_known_is_a_tie(
    lead: float, sampling: Mapping[str, Any], margin: float, ties: int
) -> None:
    found = answered([[1, 1, 1], [1, 1]], [[1, 0, 1], [1, 1]])
    part = a_part(sampling, {})
    (count,) = judge.counts([part], {part.name: found}, Scores(lead), margin).values()
    assert (count.answers, count.tokens, count.ties, count.other) == (2, 5, ties, 1 - ties)
    assert (count.later, count.steps) == (3, 4)


def test_an_answer_that_ends_early_is_no_tie() -> None:
    part = a_part({})
    found = {part.name: answered([[1, 1]], [[1]])}
    (count,) = judge.counts([part], found, Scores(0.0), 0.25).values()
    assert (count.ties, count.other) == (0, 1)


def test_greedy_tokens_are_compared_with_those_of_transformers() -> None:
    part = a_part({}, {"top_k": 3})
    found = {part.name: answered([[1, 0, 1], [2]], [[1], [2]])}
    greedy = judge.against_transformers([part], found, Scores(0.25))
    assert greedy == judge.Greedy(tokens=3, other=1, largest=0.25)


def test_a_journal_is_continued_unless_the_engines_or_the_code_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = answers.engines(tmp_path, "float32", 8)
    part, found = a_part({}), answered([[1, 2]], [[1, 2]])
    answers.Journal(tmp_path, pair, [part]).add(found)
    later = replace(part, round=1)
    again = answers.Journal(tmp_path, pair, [part, later])
    assert [each.plain for each in again.found.values()] == [found.plain]
    other = answers.engines(tmp_path, "bfloat16", 8)
    assert not answers.Journal(tmp_path, other, [part]).found
    monkeypatch.setattr(answers, "code", lambda: "changed")
    assert not answers.Journal(tmp_path, pair, [part]).found


def test_the_same_bits_are_asked_of_other_batches_without_nodes(tmp_path: Path) -> None:
    part = a_part({"top_k": 3})
    for same_bits in (True, False):
        plain, trees = answers.engines(tmp_path, "bfloat16", 8, same_bits=same_bits)
        assert answers._load(trees, part.load) == part.load
        asked = answers._load(plain, part.load).requests[0].sampling
        none = {"extra_args": {"dyntree_nodes": 0}} if same_bits else {}
        assert asked == {**part.load.requests[0].sampling, **none}
        smaller = plain.arguments["max_num_seqs"] < trees.arguments["max_num_seqs"]
        assert smaller == same_bits


def test_a_model_may_be_its_own_draft(tmp_path: Path) -> None:
    plain, trees = answers.engines(tmp_path, "bfloat16", 8, nodes=64, drafts=True)
    wanted = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 64}
    assert trees.arguments["speculative_config"] == wanted
    assert trees.arguments["max_model_len"] == plain.arguments["max_model_len"] == 8 + 32 + 64 + 1


def test_the_table_sums_the_kinds_of_a_model() -> None:
    zero = asdict(judge.Count()) | {"model": "M", "dtype": "float32", "temperature": 0.0}
    of_chat = {"kind": "chat", "answers": 2, "tokens": 8, "ties": 1, "later": 6, "steps": 4}
    of_code = {"kind": "code", "answers": 1, "tokens": 4, "other": 1, "later": 3, "steps": 1}
    lines = report.table([zero | of_chat, zero | of_code | {"temperature": 1.0}]).split("\n")
    assert lines[2] == "| M, float32 | chat | 2 | 8 | 1 | 1 | 1.50 | – |"
    assert lines[-1] == "| M, float32 | all | 3 | 12 | 2 | 1 | 1.50 | 3.00 |"

"""The sources of prompts of `dyntree bench serve`."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dyntree_plugin import pair
from dyntree_plugin.commands.bench import prompts
from dyntree_plugin.commands.loads.requests import Request


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_prompts_are_read_from_jsonl_in_the_fields_that_data_sets_use(
    tmp_path: Path, encoding: str
) -> None:
    path = tmp_path / "mine.jsonl"
    lines = [{"prompt": "a"}, {"text": "b"}, {"turns": ["c", "later"]}, {"question": "d"}]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n", encoding)
    name, found = prompts.read(str(path), 10, None)
    assert name == "mine"
    assert sorted(str(request.prompt) for request in found) == ["a", "b", "c", "d"]
    assert not any(request.sampling for request in found)
    assert prompts.read(str(path), 2, None)[1] == found[:2]


def test_two_sets_of_one_name_are_refused(tmp_path: Path) -> None:
    files = [tmp_path / folder / "asked.jsonl" for folder in ("one", "other")]
    for path in files:
        path.parent.mkdir()
        path.write_text(json.dumps({"prompt": path.parent.name}))
    one, other = map(str, files)
    found = prompts.read_all(["code", "prose", one], 1, None)
    assert found.keys() == {"held-out code", "held-out prose", "asked"}
    with pytest.raises(ValueError, match=r"--prompts '.*other.*' has the name .* 'asked'"):
        prompts.read_all([one, other], 1, None)


def test_a_data_set_of_vllms_is_read_by_its_own_flags() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(pair.paths()["target"])
    flags = "vllm:--dataset-name random --random-input-len 24"
    name, found = prompts.read(flags, 3, tokenizer, seed=1)
    assert name == "random"
    lengths = [len(tokenizer.encode(request.prompt)) for request in found]
    assert lengths == pytest.approx([24] * 3, abs=6)
    assert prompts.read(flags, 3, tokenizer, seed=1)[1] == found
    with pytest.raises(ValueError, match="--dataset-name: invalid choice"):
        prompts.read("vllm:--dataset-name nothing", 3, tokenizer)


def test_prompts_that_do_not_fit_are_left_out_and_counted() -> None:
    class Tokenizer:
        def __call__(self, texts: list[str], **_: bool) -> dict[str, list[list[int]]]:
            return {"input_ids": [list(range(len(text))) for text in texts]}

    penalty = {"repetition_penalty": 1.1}
    given = [Request("ab"), Request("abcdef"), Request("abc", penalty)]
    found, longer = prompts.tokens(given, Tokenizer(), 3)
    assert found == [Request([0, 1]), Request([0, 1, 2], penalty)]
    assert longer == 1


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def test_prompts_become_messages_of_a_chat() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(pair.paths()["target"])
    tokenizer.chat_template = TEMPLATE
    given = [Request("def f(x):", {"top_p": 0.5}), Request("b")]
    (first, _), longer = prompts.tokens(given, tokenizer, 99, chat=True)
    assert tokenizer.decode(first.prompt) == "<user>def f(x):<assistant>"
    assert (first.sampling, longer) == ({"top_p": 0.5}, 0)
    (first, _), _ = prompts.tokens(given, tokenizer, 99)
    assert list(first.prompt) == tokenizer.encode("def f(x):")
    tokenizer.chat_template = "{{ raise_exception('only systems may ask') }}"
    with pytest.raises(ValueError, match="--chat: the target's chat template fails: only systems"):
        prompts.tokens(given, tokenizer, 99, chat=True)


def test_a_data_set_of_vllms_is_written_as_messages_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def get_samples(arguments: Any, _: Any) -> list[Any]:
        asked.append(arguments.skip_chat_template)
        return [SimpleNamespace(prompt="def f(x):")]

    monkeypatch.setattr("vllm.benchmarks.datasets.get_samples", get_samples)
    tokenizer = SimpleNamespace(chat_template=TEMPLATE)
    for chat in (True, False):
        prompts.read("vllm:--dataset-name custom", 1, tokenizer, chat=chat)
    assert asked == [True, False]

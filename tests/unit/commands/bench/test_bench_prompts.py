"""The sources of prompts of `dyntree bench serve`."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from dyntree_plugin import pair
from dyntree_plugin.commands.bench import prompts
from dyntree_plugin.commands.loads.requests import Request


def test_prompts_are_read_from_jsonl_in_the_fields_that_data_sets_use(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    lines = [{"prompt": "a"}, {"text": "b"}, {"turns": ["c", "later"]}, {"question": "d"}]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    name, found = prompts.read(str(path), 10, None)
    assert name == "mine"
    assert sorted(str(request.prompt) for request in found) == ["a", "b", "c", "d"]
    assert not any(request.sampling for request in found)
    assert prompts.read(str(path), 2, None)[1] == found[:2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "mine.jsonl', line 1 is not JSON"),
        ('{"prompt": 3}', "as text in one of"),
        ("", "no lines"),
        ('{"prompt": "a", "sampling": 3}', "line 1 must have a JSON object in sampling"),
    ],
)
def test_a_file_that_holds_no_prompts_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        prompts.read(str(path), 10, None)


def test_a_set_that_does_not_exist_is_refused_with_what_there_is() -> None:
    message = (
        "must be 'code', 'prose', 'json', 'tools', 'regex', 'mixed', a JSONL file that exists, or "
    )
    with pytest.raises(ValueError, match=message):
        prompts.read("nothing.jsonl", 1, None)


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


def test_what_a_data_set_of_vllms_needs_is_said(tmp_path: Path) -> None:
    (tmp_path / "question.jsonl").write_text(json.dumps({"category": "qa", "turns": ["Who?"]}))
    flags = f"vllm:--dataset-name spec_bench --dataset-path {tmp_path / 'question.jsonl'}"
    with pytest.raises(ValueError, match="use a JSONL file"):
        prompts.read(flags, 1, None)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(pair.paths()["target"])
    if find_spec("pandas") is None:
        with pytest.raises(ValueError, match="pip install pandas"):
            prompts.read(flags, 1, tokenizer)
    else:
        read = prompts.read(flags, 1, tokenizer)
        assert read == ("spec_bench question.jsonl", [Request("Who?")])


def test_prompts_that_do_not_fit_are_left_out_and_counted() -> None:
    class Tokenizer:
        def encode(self, text: str) -> list[int]:
            return list(range(len(text)))

    penalty = {"repetition_penalty": 1.1}
    given = [Request("ab"), Request("abcdef"), Request("abc", penalty)]
    found, longer = prompts.tokens(given, Tokenizer(), 3)
    assert found == [Request([0, 1]), Request([0, 1, 2], penalty)]
    assert longer == 1

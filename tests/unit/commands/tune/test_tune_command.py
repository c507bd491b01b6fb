"""`dyntree tune` refuses what cannot serve before a model loads, and keeps what it has."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from command_lines import ran, refused
from transformers import AutoTokenizer
from typer.testing import Result

from dyntree_plugin import pair
from dyntree_plugin.commands.tune import check, heads, prompts, tuning
from dyntree_plugin.commands.tune.write import PART, parts
from dyntree_plugin.pair import held_out_prompts
from dyntree_plugin.tune import eagle

TARGET, DRAFT = map(str, pair.target_and_draft())

Tune = Callable[..., Result]


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[tuning.Tuning]:
    """Return the runs that pass all checks; none of them computes anything."""
    found: list[tuning.Tuning] = []

    def run(self: tuning.Tuning) -> bool:
        found.append(self)
        with self.folder.held():
            self.folder.begin(self.settings)
        return True

    monkeypatch.setattr(tuning.Tuning, "run", run)
    return found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a file of 40 prompts."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in held_out_prompts(40)))
    return path


@pytest.fixture
def tune(tmp_path: Path, file: Path, begun: list[tuning.Tuning]) -> Tune:
    def tuned(*words: str, models: tuple[str, ...] = (TARGET, DRAFT)) -> Result:
        options = zip(("--target", "--draft"), models, strict=False)
        given = [f"{name}={model}" for name, model in options]
        given += ["--prompts", str(file), "--output", str(tmp_path / "out"), "--held-out", "8"]
        return ran("tune", *given, *words)

    return tuned


@pytest.mark.parametrize("new", [("--head", "eagle3"), ("--draft-layers", "2")])
def test_a_draft_is_needed_unless_one_is_made(
    new: tuple[str, str], tune: Tune, begun: list[tuning.Tuning]
) -> None:
    assert "--draft is missing" in refused(tune(models=(TARGET,)))
    assert tune(*new, models=(TARGET,)).exit_code == 0
    assert begun[0].settings.draft is None


@pytest.mark.parametrize(
    ("layers", "change", "said"),
    [
        (6, {}, "--draft-layers 6 must be less than 6"),
        (1, {"layer_types": ["linear_attention"] * 6}, "some are linear_attention: give --draft"),
        (1, {"quantization_config": {"quant_method": "fp8"}}, "is quantised (fp8)"),
    ],
)
def test_a_target_of_which_no_draft_can_be_made_is_refused(
    layers: int, change: dict[str, object], said: str, tune: Tune, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(TARGET, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | change))
    assert said in refused(tune("--draft-layers", str(layers), models=(str(other),)))


def test_a_draft_of_another_vocabulary_is_refused(tune: Tune, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(DRAFT, other)
    content = json.loads((other / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    ids = sorted(vocabulary.values(), reverse=True)
    content["model"]["vocab"] = dict(zip(vocabulary, ids, strict=True))
    (other / "tokenizer.json").write_text(json.dumps(content))
    assert "must have the vocabulary of --target" in refused(tune(models=(TARGET, str(other))))


@pytest.mark.parametrize("name", heads.OTHER_NORMS)
def test_a_head_that_training_would_compute_otherwise_is_refused(
    name: str, tune: Tune, tmp_path: Path
) -> None:
    """Control: the head as it is is trained, and need not say how many states it reads."""
    other = tmp_path / "other"
    shutil.copytree(pair.paths()["eagle3"], other)
    config = json.loads((other / "config.json").read_text()) | {"num_aux_hidden_states": None}
    (other / "config.json").write_text(json.dumps(config | {name: True}))
    given = "--head", "eagle3"
    said = refused(tune(*given, models=(TARGET, str(other))))
    assert f"cannot be trained: it has {name}" in said
    (other / "config.json").write_text(json.dumps(config))
    assert tune(*given, models=(TARGET, str(other))).exit_code == 0
    assert eagle.load_head(other).fc.weight.shape[1] == 3 * config["hidden_size"]


def test_the_same_command_goes_on_and_another_is_refused(tune: Tune, file: Path) -> None:
    assert tune().exit_code == 0
    assert tune().exit_code == 0
    line = refused(tune("--epochs", "3"))
    assert "holds a run with another --epochs, 2.0 and not 3.0" in line
    with file.open("a") as more:
        more.write('{"prompt": "one more"}\n')
    assert "another content of --prompts" in refused(tune())


def test_an_equal_prompt_is_not_both_learned_and_held_out(file: Path) -> None:
    """Control: without it, nothing is left out."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    once = prompts.read(file, tokenizer, 999, 8, 0, chat=False)
    file.write_text(file.read_text() * 2)
    twice = prompts.read(file, tokenizer, 999, 8, 0, chat=False)
    assert (twice.held_out, twice.learn, twice.digest) == (once.held_out, once.learn, once.digest)
    assert not once.notes
    assert twice.notes[0].startswith("40 of the prompts are equal to others")


def test_parts_hold_every_prompt_once_and_begin_with_those_held_out() -> None:
    held_out, learn = [[n] for n in range(10)], [[n] for n in range(10, 300)]
    cut, first = parts(prompts.Prompts(held_out, learn, "", []))
    assert first == 1
    assert [each for part in cut for each in part] == held_out + learn
    assert max(map(len, cut)) == PART


def test_a_gain_is_the_mean_ratio_over_all_places() -> None:
    before = {(0.0, 16): 4.0, (1.0, 16): 2.0}
    assert check.gain(before, {(0.0, 16): 4.0, (1.0, 16): 2.0}) == pytest.approx(1)
    assert check.gain(before, {(0.0, 16): 2.0, (1.0, 16): 4.0}) == pytest.approx(1)
    assert check.gain(before, {(0.0, 16): 5.0, (1.0, 16): 2.5}) == pytest.approx(1.25)
    # A new head is compared with one token per step.
    assert check.gain(None, {(0.0, 16): 4.0, (1.0, 16): 1.0}) == pytest.approx(2)

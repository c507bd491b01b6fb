"""`dyntree tune` names a file that is damaged, says what to do, and changes nothing.

No engine starts here: the target's answers and the tokens per step are made up.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from command_lines import ran, refused
from made_up_engines import FakePool
from safetensors.torch import load_file, save_file
from typer.testing import Result

from dyntree_plugin import openmp, pair
from dyntree_plugin.commands.ending import Ended
from dyntree_plugin.commands.tune import check, learn, write
from dyntree_plugin.commands.tune.settings import Folder
from dyntree_plugin.pair import held_out_prompts
from dyntree_plugin.tune.optimize import Checkpoint

TARGET, DRAFT = map(str, pair.target_and_draft())
VOCABULARY = 1024
PROMPTS = 24
HEAD = ("--head", "eagle3", "--head-vocabulary", "64")

Change = Callable[[Path], object]


class Answers(FakePool):
    def serve(self, load: Any) -> tuple[None, list[tuple[int, ...]]]:
        drawn = random.Random(0)
        return None, [tuple(drawn.choices(range(VOCABULARY), k=8)) for _ in load.requests]


def steps(settings: Any, _: object, drafts: Mapping[str, object], __: object) -> dict[str, Any]:
    return {name: {(t, 16): 2.0 for t in settings.temperatures} for name in drafts}


@pytest.fixture(autouse=True)
def no_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "Pool", Answers)
    monkeypatch.setattr(check, "measure", steps)


def tune(output: Path, *more: str, draft: str | None = DRAFT) -> Result:
    """Tune for four steps. A run that ends as it should has status 1: nothing has become better."""
    prompts = output.with_suffix(".jsonl")
    lines = [json.dumps({"prompt": text[:80]}) for text in held_out_prompts(PROMPTS)]
    prompts.write_text("\n".join(lines))
    return ran(
        *("tune", "--target", TARGET, "--prompts", str(prompts), "--output", str(output)),
        *("--held-out", "8", "--max-tokens", "8", "--temperature", "1"),
        *([] if draft is None else ["--draft", draft]), *more,
    )  # fmt: skip


def content(folder: Path) -> dict[str, bytes]:
    """Return all files of a folder."""
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def killed(output: Path, *more: str, draft: str | None = DRAFT) -> Path:
    """Tune until the first checkpoint is written."""
    stock = Checkpoint.write

    def once(self: Checkpoint, state: Mapping[str, Any]) -> None:
        stock(self, state)
        raise Ended(130)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoint, "write", once)
        patch.setattr(write, "Pool", Answers)
        patch.setattr(openmp, "restart_with_library", lambda: None)
        assert tune(output, *more, draft=draft).exit_code == 130
    return output


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that was killed in the fit."""
    return killed(tmp_path_factory.mktemp("begun") / "out")


@pytest.fixture
def out(begun: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(begun, tmp_path / "out"))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def last_byte_lost(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def garbage(file: Path) -> None:
    file.write_bytes(random.Random(0).randbytes(1000))


def text(value: str) -> Change:
    return lambda file: file.write_text(value)


def tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Change one tensor of a shard."""

    def changed(file: Path) -> None:
        tensors = load_file(file)
        save_file(tensors | {name: change(tensors[name]).contiguous()}, file)

    return changed


def of_token(number: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tokens: tokens.clone().index_fill_(0, torch.tensor([5]), number)


def state(**more: object) -> Change:
    """Change the state in a checkpoint."""
    return lambda file: torch.save(torch.load(file) | more, file)


BYTES = [last_byte_lost, garbage]
SHARD = "taught/00001.safetensors"
DAMAGE: list[tuple[str, Change]] = [
    *((SHARD, change) for change in BYTES),
    (SHARD, tensor("tokens", of_token(VOCABULARY))),
    (SHARD, tensor("tokens", torch.Tensor.float)),
    (SHARD, tensor("lengths", torch.zeros_like)),
    (SHARD, tensor("top_log_probs", lambda found: found.fill_(torch.nan))),
    *(("checkpoint.pt", change) for change in BYTES),
    *(("checkpoint.pt", state(step=step)) for step in (10**15, "two")),
    ("checkpoint.pt", state(model={})),
    *(("losses.json", text(value)) for value in ("[[0, 1]]", "[" * 99999)),
    *(("settings.json", change) for change in (empty, text("null"))),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change"), DAMAGE)
def test_a_damaged_file_is_named_with_the_remedy_and_nothing_changes(
    name: str, change: Change, out: Path
) -> None:
    file = out / "tune" / name
    change(file)
    before = content(out)
    line = refused(tune(out))
    assert f"{str(file)!r} is damaged: " in line
    assert ("restore it" if name == "settings.json" else "delete it, and give the same") in line
    assert len(line) < 500
    assert content(out) == before


def first(**more: object) -> Change:
    """Change the first text of a part."""

    def changed(file: Path) -> None:
        begin, *rest = json.loads(file.read_text())
        file.write_text(json.dumps([begin | more, *rest]))

    return changed


WRITTEN = [
    cut, text("[]"), text("[5]"), first(prompt=[]), first(answer=None), first(answer=[VOCABULARY]),
    first(answer=[0.5]), first(temperature=-1), first(seed=2**70),
]  # fmt: skip


def test_texts_that_the_target_cannot_have_written_are_refused(out: Path) -> None:
    folder = Folder(out)
    assert len(write.samples(folder, 1, VOCABULARY)) == PROMPTS - 8
    whole = folder.written(1).read_bytes()
    for change in WRITTEN:
        folder.written(1).write_bytes(whole)
        change(folder.written(1))
        with pytest.raises(ValueError, match=r"00001.json' is damaged: delete it, and"):
            write.samples(folder, 1, VOCABULARY)


def test_the_remedy_is_right_for_every_file(begun: Path, out: Path, tmp_path: Path) -> None:
    """Each damaged file is deleted as the command says; the weights end as without damage."""
    names = ["taught/00000.safetensors", SHARD, "written/00001.json", "losses.json"]
    names += ["checkpoint.pt", "written/00000.json"]
    for name in names:
        cut(out / "tune" / name)
    deleted = []
    while (result := tune(out)).exit_code == 2:
        file = Path(refused(result).split("'")[1])
        deleted.append(str(file.relative_to(out / "tune")))
        file.unlink()
    assert result.exit_code == 1, result.output
    assert sorted(deleted) == sorted(names)
    assert "Not better" in result.output
    whole = Path(shutil.copytree(begun, tmp_path / "whole"))
    assert tune(whole).exit_code == 1
    weights = "tune/fitted/model.safetensors"
    assert content(out)[weights] == content(whole)[weights]

    # A fitted model that is damaged is fitted again.
    cut(out / weights)
    line = refused(tune(out))
    assert f"{str(out / 'tune/fitted')!r} is damaged: delete it, and" in line
    shutil.rmtree(out / "tune/fitted")
    assert tune(out).exit_code == 1
    assert content(out)[weights] == content(whole)[weights]


def test_a_head_has_its_weights_of_the_target_made_again(tmp_path: Path) -> None:
    out = killed(tmp_path / "out", *HEAD, draft=None)
    file = out / "tune" / "of-target.safetensors"
    before = file.read_bytes()
    cut(file)
    assert "of-target.safetensors' is damaged" in refused(tune(out, *HEAD, draft=None))
    file.unlink()
    assert tune(out, *HEAD, draft=None).exit_code == 0
    assert file.read_bytes() == before


def test_a_new_draft_model_goes_on_from_what_was_cut_out(tmp_path: Path) -> None:
    layers = ("--draft-layers", "2")
    out = killed(tmp_path / "out", *layers, draft=None)
    begun, fitted = out / "tune/begun", out / "tune/fitted"
    cut(begun / "model.safetensors")
    assert f"{str(begun)!r} is damaged: delete it" in refused(tune(out, *layers, draft=None))
    shutil.rmtree(begun)
    assert tune(out, *layers, draft=None).exit_code == 0
    made, start, whole = (
        load_file(folder / "model.safetensors") for folder in (fitted, begun, Path(TARGET))
    )
    assert made.keys() == start.keys() < whole.keys()
    assert start["model.layers.0.mlp.up_proj.weight"].equal(
        whole["model.layers.0.mlp.up_proj.weight"]
    )
    assert not made["model.norm.weight"].equal(start["model.norm.weight"])
    assert {file.name for file in Path(TARGET).iterdir()} <= {
        file.name for file in fitted.iterdir()
    }
    # Without a kill the weights are the same.
    again = tmp_path / "again"
    assert tune(again, *layers, draft=None).exit_code == 0
    assert (
        content(again)["tune/fitted/model.safetensors"]
        == content(out)["tune/fitted/model.safetensors"]
    )


def test_losses_that_are_ahead_of_the_checkpoint_are_measured_again(out: Path) -> None:
    file = out / "tune" / "losses.json"
    there = json.loads(file.read_text())
    file.write_text(json.dumps([*there, [2, 0.1, 0.1], [10**6, 0.1, 0.1]]))
    assert tune(out).exit_code == 1
    curve = learn.read_curve(file)
    assert list(curve) == [0, 1, 2, 3, 4]
    assert curve[2] != (0.1, 0.1)


def test_a_write_that_fails_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint(tmp_path / "state.pt")
    checkpoint.write({"step": 1})

    def full(_: object, file: Path) -> None:
        file.write_bytes(b"half")
        raise RuntimeError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with pytest.raises(ValueError, match=r"state.pt' cannot be written \(the disk is full\)"):
            checkpoint.write({"step": 2})
    assert checkpoint.read() == {"step": 1}
    checkpoint.write({"step": 2})
    assert checkpoint.read() == {"step": 2}


def test_two_runs_at_a_time_are_refused(out: Path) -> None:
    settings = Folder(out).settings
    before = settings.read_bytes()
    with Folder(out).held():
        assert "is in use: wait until the other" in refused(tune(out))
        assert settings.read_bytes() == before
    assert tune(out).exit_code == 1


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_model_whose_files_are_damaged_is_named(name: str, tmp_path: Path) -> None:
    draft = Path(shutil.copytree(DRAFT, tmp_path / "draft"))
    (draft / name).write_text("{")
    assert str(draft) in refused(tune(tmp_path / "out", draft=str(draft)))

"""`dyntree show` without engines."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from command_lines import status
from generations import made, of_several_sources

from dyntree_plugin import pair
from dyntree_plugin.commands.show import command as show
from dyntree_plugin.commands.show import record
from dyntree_plugin.commands.show.generation import load, save


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.json"
    save(made(), path)
    return str(path)


def run(*arguments: str) -> int:
    return status("show", *arguments)


def test_every_step_is_drawn_in_the_terminal(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--from", trace) == 0
    shown = capsys.readouterr().out
    assert "Step 1 of 2: 4 nodes, 2 accepted" in shown
    assert "Step 2 of 2: 1 nodes, 0 accepted" in shown
    assert "✓ x" in shown
    assert "+ ):" in shown


def test_sources_are_shown_in_every_step_if_the_trace_has_several(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ("--from", trace, "--step", "2")
    assert run(*line) == 0
    assert not re.search("draft|look-up", capsys.readouterr().out)
    save(of_several_sources(), Path(trace))
    assert run(*line) == 0
    shown = capsys.readouterr().out
    assert "draft" in shown
    assert "look-up in the text so far" in shown


@pytest.mark.parametrize("form", ["terminal", "html"])
def test_a_trace_without_a_tree_is_told_and_not_drawn(
    trace: str, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save(made(steps=[]), Path(trace))
    assert run("--from", trace, "--format", form) == 2
    told = capsys.readouterr()
    assert "there is no tree to draw" in told.err
    assert not told.out


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the settings with which a generation is recorded; no engine starts."""
    found: list[Any] = []

    def recorded(settings: Any, announce: Any) -> Any:
        found.append(settings)
        return made()

    monkeypatch.setattr(record, "record", recorded)
    return found


def test_a_recorded_generation_is_saved_and_drawn(
    asked: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.json"
    line = ["def f", "--nodes", "8", "--temperature", "0.5", "--seed", "3"]
    assert run(*line, "--trace", str(path)) == 0
    (settings,) = asked
    assert settings.prompts == ["def f"]
    assert (settings.nodes, settings.temperature, settings.seed) == (8, 0.5, 3)
    assert load(path) == made()
    assert "Step 2 of 2" in capsys.readouterr().out


def test_the_method_says_what_drafts(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    folders = {name: Path("/pair") / name for name in ("target", "draft", "eagle3")}
    monkeypatch.setattr(pair, "paths", lambda: folders)
    monkeypatch.setattr(show, "fetch", lambda model: None)
    run("a")
    run("a", "--method", "eagle3")
    run("a", "--method", "mtp", "--target", "T")
    assert [(each.method, each.draft) for each in asked] == [
        ("draft_model", "/pair/draft"), ("eagle3", "/pair/eagle3"), ("mtp", None),
    ]  # fmt: skip

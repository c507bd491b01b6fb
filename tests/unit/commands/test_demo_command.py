"""The demonstration, without engines."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from command_lines import status
from rich.console import Console

from dyntree_plugin import pair
from dyntree_plugin.commands.arguments import DtypeName
from dyntree_plugin.commands.demo import command as demo
from dyntree_plugin.commands.demo import comparison, screen
from dyntree_plugin.commands.demo.comparison import Comparison, Completions
from dyntree_plugin.commands.engine import Task, with_trees
from dyntree_plugin.commands.loads.runs import Run
from dyntree_plugin.tree.step import Source, TreeStep

PROMPTS = ["def f(x):", "class C:"]


def completed(*answers: Sequence[int]) -> Completions:
    run = Run(
        round=0, requests=len(answers), seconds=1.0, output_tokens=sum(map(len, answers)),
        tpot_ms=1.0, ttft_ms=1.0, step_ms=1.0, request_steps=4,
        stages_ms={"target": 0.5, "draft": 0.25, "catch_up": 0.1},
    )  # fmt: skip
    return Completions(run, [[*answer] for answer in answers])


def step(parents: list[int], accepted: list[int]) -> TreeStep:
    """Return a step whose tree's nodes are in order of falling value."""
    tokens = list(range(len(parents)))
    values = [-float(node) for node in tokens]
    sources: list[Source] = ["draft"] * len(tokens)
    return TreeStep("r", 0, 1, 50, tokens, parents, values, sources, accepted, [*accepted, 51])


def shown(
    plain: Completions,
    tree: Completions,
    traces: list[list[TreeStep]] | None = None,
    dtype: DtypeName = "float32",
) -> tuple[int, str]:
    task = Task("t", "d", dtype, 16, {}, 0.0, 1.0, 0, 8, PROMPTS)
    comparison = Comparison(
        [[1], [1]], plain, tree, traces or [[], []], str, lambda token: f"<{token}>"
    )
    file = io.StringIO()
    status = screen.show(Console(file=file, width=200), task, comparison)
    return status, file.getvalue()


def test_the_same_tokens_end_with_status_0() -> None:
    status, text = shown(completed([3, 4, 5], [6]), completed([3, 4, 5], [6]))
    assert status == 0
    assert "The text is the same" in text
    assert "2 completions, 4 tokens" in text


def test_a_wrong_token_ends_with_status_1_and_is_named() -> None:
    status, text = shown(completed([3, 4, 5], [6, 7]), completed([3, 4, 5], [6, 8]))
    assert status == 1
    assert "The text is the same" not in text
    assert "differs with the tree in 1 of 2 completions" in text
    assert "completion 2, token 2: <7> without the tree, <8> with it" in text


def test_the_step_to_draw_leaves_the_first_guess_and_is_accepted_far() -> None:
    first_guesses = step([-1, 0, 1, -1], accepted=[0, 1, 2])
    turned = step([-1, -1, 1], accepted=[1])
    turned_further = step([-1, -1, 1], accepted=[1, 2])
    traces = [[first_guesses, turned], [turned_further]]
    assert screen.most_telling(traces) == (1, turned_further)


QUIET = """
import os, subprocess, sys
from dyntree_plugin.commands.start import quiet
with quiet() as screen:
    print("from python")
    subprocess.run(["echo", "from a child"])
    print("ERROR 01-01 something broke", file=sys.stderr)
    os.write(2, b"from C++\\n")
    print("on the screen", file=screen)
    {end}
print("afterwards")
"""


def quietly(end: str) -> subprocess.CompletedProcess[str]:
    code = QUIET.format(end=end)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_only_errors_get_past_the_quiet() -> None:
    done = quietly("pass")
    assert done.stdout == "on the screen\nafterwards\n"
    assert done.stderr == "ERROR 01-01 something broke\n"


def test_an_interruption_shows_no_more() -> None:
    assert "from a child" not in quietly("raise SystemExit(130)").stderr


def test_everything_is_shown_where_the_quiet_ends_in_an_exception() -> None:
    done = quietly("raise RuntimeError('engine died')")
    for part in ("from python", "from a child", "from C++", "engine died"):
        assert part in done.stderr


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[Task]:
    """Return the tasks of the runs that were asked for; no engine starts, nothing is fetched."""
    asked: list[Task] = []

    def compare(task: Task, announce: Any) -> Comparison:
        asked.append(task)
        return Comparison([[1]], completed([3]), completed([3]), [[], []], str, str)

    monkeypatch.setattr(demo, "compare", compare)
    monkeypatch.setattr(demo, "fetch", lambda model: None)
    return asked


@pytest.mark.parametrize(
    ("arguments", "speculation", "heading"),
    [
        ([], {"method": "draft_model", "model": "/pair/draft"}, "draft  /pair/draft"),
        (["--method", "eagle3"], {"method": "eagle3", "model": "/pair/eagle3"},
         "head   /pair/eagle3"),
        (["--method", "eagle", "--target", "T", "--draft", "H"],
         {"method": "eagle", "model": "H"}, "head   H"),
        (["--method", "mtp", "--target", "T"], {"method": "mtp"}, "head   the target holds it"),
        (["--method", "dflash"],
         {"method": "dflash", "model": "/pair/dflash", "num_speculative_tokens": 7},
         "draft  /pair/dflash"),
    ],
)  # fmt: skip
def test_the_method_says_what_drafts(
    arguments: list[str],
    speculation: dict[str, Any],
    heading: str,
    compared: list[Task],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = ("target", "draft", "eagle3", "dflash")
    monkeypatch.setattr(pair, "paths", lambda: {name: Path("/pair") / name for name in names})
    monkeypatch.setattr("dyntree_plugin.commands.engine.block_length", lambda draft: 7)
    status("demo", "--num-prompts", "1", "--nodes", "8", *arguments)
    (task,) = compared
    wanted = {"num_speculative_tokens": 8} | speculation
    assert with_trees(task)["speculative_config"] == wanted
    shown = capsys.readouterr().out
    assert heading in shown
    assert f"│ {heading.split()[0]} " in shown  # where a step's time goes


@pytest.mark.parametrize(("on_cpu", "processes"), [(True, "0"), (False, None)])
def test_on_a_cpu_no_process_imports_vllm_anew(
    on_cpu: bool, processes: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm
    from vllm.platforms import current_platform

    name = "VLLM_ENABLE_V1_MULTIPROCESSING"
    monkeypatch.setenv(name, "")  # so that what the command sets is undone
    monkeypatch.delenv(name)
    found: list[str | None] = []

    @contextmanager
    def engine(arguments: Any) -> Iterator[None]:
        found.append(os.environ.get(name))
        raise InterruptedError
        yield

    monkeypatch.setattr(vllm, "EngineArgs", MagicMock())
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: on_cpu)
    monkeypatch.setattr(comparison, "engine", engine)
    task = Task("t", "d", "float32", 8, {}, 0.0, 1.0, 0, 8, PROMPTS)
    with pytest.raises(InterruptedError):
        comparison.compare(task, lambda *_: nullcontext(lambda: None))
    assert found == [processes]

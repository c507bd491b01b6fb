"""Show the result of the demonstration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from rich.bar import Bar
from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from dyntree_plugin.commands.demo.comparison import Comparison, Completions
from dyntree_plugin.commands.engine import Task
from dyntree_plugin.commands.loads.runs import Run
from dyntree_plugin.commands.render import ACCEPTED, Detokenise, step_panel, visible
from dyntree_plugin.escape import escaped_lines
from dyntree_plugin.tree.step import TreeStep, sources_of

_SLOWER = (
    "Slower here: the tree costs more than the target's forwards that it saves. A tree pays if the "
    "target is much larger than the {}.\n"
)
_ROUNDED = Text(
    "Engines that sum in different orders may differ if two tokens are almost equally likely. With "
    "--dtype float32 that is rare.\n",
    style="yellow",
)
_CONTEXT_TOKENS = 200


def show(console: Console, task: Task, comparison: Comparison) -> int:
    """Show everything; return the exit status, which is 1 if the text differs."""
    plain, with_tree, text = comparison.plain, comparison.tree, comparison.text
    drawn = most_telling(comparison.traces)
    index, step = drawn or (0, None)
    answer = with_tree.answers[index]
    console.print(code(task.prompts[index], comparison.decode(answer)))
    if step is not None:
        context = [*comparison.prompts[index], *answer][: step.context_length]
        before = "".join(map(text, context[-_CONTEXT_TOKENS:]))
        console.print(step_panel(step, before, text, sources=sources_of([step])))
    console.print(speeds(plain, with_tree))
    console.print(step_times(with_tree.run, task.drafter))
    if with_tree.tokens_per_second < plain.tokens_per_second:
        console.print(Text(_SLOWER.format(task.drafter), style="yellow"))
    different = differences(plain, with_tree)
    console.print(verdict(plain, different, text))
    if different and task.dtype != "float32":
        console.print(_ROUNDED)
    return 1 if different else 0


@dataclass(frozen=True)
class FirstDifference:
    """The first tokens in which two completions of a prompt differ; None if one has ended."""

    prompt: int
    position: int
    without: int | None
    with_tree: int | None


def differences(plain: Completions, tree: Completions) -> list[FirstDifference]:
    """Return the first difference of every prompt whose completions differ."""
    different = []
    for prompt, completions in enumerate(zip(plain.answers, tree.answers, strict=True)):
        for position, tokens in enumerate(zip_longest(*completions)):
            if tokens[0] != tokens[1]:
                different.append(FirstDifference(prompt, position, *tokens))
                break
    return different


def most_telling(traces: Sequence[Sequence[TreeStep]]) -> tuple[int, TreeStep] | None:
    """Choose the prompt and the step to draw, or None if no step had a tree.

    The best step has a long accepted path that leaves the draft's first choice at least once.
    """
    steps = [(prompt, step) for prompt, steps in enumerate(traces) for step in steps]
    return max(steps, key=lambda entry: _interest(entry[1]), default=None)


def _interest(step: TreeStep) -> tuple[bool, int, int]:
    turns = sum(
        step.children(parent)[0] != node
        for parent, node in zip([-1, *step.accepted], step.accepted, strict=False)
    )
    return turns > 0, len(step.accepted), turns


def code(prompt: str, completion: str) -> RenderableType:
    """Show a prompt and its completion; the completion's lines are marked."""
    first = prompt.count("\n") + (2 if completion.startswith("\n") else 1)
    whole = escaped_lines((prompt + completion).rstrip())
    syntax = Syntax(
        whole,
        "python",
        line_numbers=True,
        highlight_lines=set(range(first, whole.count("\n") + 2)),
        word_wrap=True,
        background_color="default",
    )
    return Panel(syntax, title="❱ completed by the target", title_align="left", padding=(0, 1))


def speeds(plain: Completions, tree: Completions) -> Table:
    """Compare tokens per step, times and speed of both runs."""
    table = Table(title="One request at a time", title_justify="left", title_style="bold")
    table.add_column()
    table.add_column("without tree", justify="right")
    table.add_column("with tree", justify="right")
    both = (plain, tree)
    table.add_row(
        "tokens per target step", *(f"{each.tokens_per_step:.2f}" for each in both), style="bold"
    )
    table.add_row("time per target step", *(_ms(each.run.seconds / each.steps) for each in both))
    table.add_row("time per token", *(_ms(1 / each.tokens_per_second) for each in both))
    table.add_row("tokens per second", *(f"{each.tokens_per_second:.0f}" for each in both))
    table.add_row("speed", "1.00×", f"{tree.tokens_per_second / plain.tokens_per_second:.2f}×")
    return table


def step_times(run: Run, drafter: str) -> Table:
    """Show where a step with a tree spends its time; ``drafter`` names what drafts."""
    rows = {
        "target": ("target",),
        drafter: ("catch_up", "draft"),
        "other": ("place", "sample", "verify"),
    }
    whole = left = run.step_ms / 1e3
    table = Table(title=f"Where a step's {_ms(whole)} go", title_justify="left", title_style="bold")
    table.add_column()
    table.add_column("per step", justify="right")
    table.add_column("share", min_width=20)
    table.add_column("what it is", style="dim")
    for name, stages in rows.items():
        spent = {stage: run.stages_ms.get(stage, 0.0) / 1e3 for stage in stages}
        seconds = sum(spent.values())
        left -= seconds
        meaning = ", ".join(f"{stage} {_ms(part)}" for stage, part in spent.items())
        if name == "target":
            meaning = "the target's forward over all nodes"
        table.add_row(name, _ms(seconds), Bar(whole, 0, seconds, width=20), meaning)
    left = max(left, 0.0)
    table.add_row("engine", _ms(left), Bar(whole, 0, left, width=20), "vLLM around the worker")
    return table


def verdict(plain: Completions, different: Sequence[FirstDifference], text: Detokenise) -> Text:
    """Say whether the text is the same, and where it differs."""
    prompts = len(plain.answers)
    if not different:
        return Text(
            f"{ACCEPTED} The text is the same with and without the tree: "
            f"{prompts} completions, {plain.run.output_tokens} tokens.",
            style="bold green",
        )
    lines = [f"The text differs with the tree in {len(different)} of {prompts} completions:"]
    for each in different:
        without, with_tree = (
            "the end" if token is None else visible(text(token))
            for token in (each.without, each.with_tree)
        )
        lines.append(
            f"  completion {each.prompt + 1}, token {each.position + 1}: "
            f"{without} without the tree, {with_tree} with it"
        )
    return Text("\n".join(lines), style="bold red")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"

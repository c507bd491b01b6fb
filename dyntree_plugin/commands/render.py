"""Draw a verified tree in a terminal, as a renderable of rich."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.text import Text
from rich.tree import GuideType, Tree

from dyntree_plugin.escape import escaped, escaped_lines
from dyntree_plugin.tree.step import Source, TreeStep

Detokenise = Callable[[int], str]
"""Returns the text of one token as it appears after other tokens."""

ACCEPTED = "✓"
BONUS = "+"
MAX_SIBLINGS = 6
_MAX_LABEL = 40
_CODE_LINES = 4
_GUIDE_WIDTHS = (4, 3, 2, 1)


@dataclass(frozen=True, slots=True)
class _Look:
    """How to show nodes of a source: a ``mark`` after their numbers, and its colour. In legends
    ``about`` follows the mark."""

    mark: str
    about: str
    colour: str


_LOOKS: dict[Source, _Look] = {
    "draft": _Look("draft", "", "yellow"),
    "look_up": _Look("look-up", " in the text so far", "magenta"),
    "both": _Look("both", ": look-up, and scored by the draft", "red"),
}


class _Fitted(Tree):
    """A tree whose guide lines are as wide as the longest label allows; a label takes one line."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = next(
            (each for each in _GUIDE_WIDTHS if _width(self, each) <= options.max_width),
            _GUIDE_WIDTHS[-1],
        )
        self.ASCII_GUIDES = _cut(Tree.ASCII_GUIDES, width)
        self.TREE_GUIDES = [_cut(guides, width) for guides in Tree.TREE_GUIDES]
        yield from super().__rich_console__(console, options)


def _cut(guides: GuideType, width: int) -> GuideType:
    space, line, fork, end = (each[:width] for each in guides)
    return space, line, fork, end


def _width(tree: Tree, guide: int) -> int:
    """Return the characters of the longest line if a level takes ``guide`` of them."""
    below = [guide + _width(child, guide) for child in tree.children]
    return max([cell_len(str(tree.label)), *below])


_VISIBLE = str.maketrans({" ": "·", "\n": "↵", "\t": "⇥", "\r": "␍"})


def visible(text: str) -> str:
    """Return ``text`` on one line, with spaces, line breaks and control characters made visible."""
    if not text:
        return "∅"
    shown = escaped(text.translate(_VISIBLE))
    return shown if len(shown) <= _MAX_LABEL else shown[: _MAX_LABEL - 1] + "…"


def rich_tree(
    step: TreeStep,
    text: Detokenise,
    max_siblings: int | None = MAX_SIBLINGS,
    *,
    with_sources: bool = False,
) -> Tree:
    """Return the tree as a renderable of rich.

    Every node shows its token and two estimated probabilities: that it is accepted if its parent
    is, and that its whole path is accepted (its value); ``with_sources``, also its source. Accepted
    nodes are bold and marked with ✓. The bonus token is a leaf. If there are more than
    ``max_siblings`` siblings (None: no limit), one line counts the least valuable ones; accepted
    nodes always stay.
    """
    end = step.accepted[-1] if step.accepted else -1

    def grow(branch: Tree, parent: int) -> Tree:
        """Draw what is below ``parent`` (-1: the root), whose branch is given and returned."""
        children = step.children(parent)
        shown = _shown(children, step.accepted, max_siblings)
        for child in shown:
            label = _label(step, child, text)
            if with_sources:
                look = _LOOKS[step.sources[child]]
                label.append(f"  {look.mark}", style=f"not bold {look.colour}")
            grow(branch.add(label), child)
        if left_out := [child for child in children if child not in shown]:
            branch.add(_line(_summary(step, left_out), "dim"))
        if parent == end:
            bonus = _line(f"{BONUS} {visible(text(step.bonus_token))}", "bold cyan")
            branch.add(bonus.append("  bonus", style="not bold dim"))
        return branch

    return grow(_Fitted(_root_label(step, text)), -1)


def step_panel(
    step: TreeStep,
    before: str,
    text: Detokenise,
    title: str = "One step",
    sources: Sequence[Source] = (),
) -> RenderableType:
    """Draw one step's tree below the last lines of ``before``, the text up to its root.

    ``sources``: of all shown trees. If there are several, every node shows its source.
    """
    lines = escaped_lines("\n".join(before.splitlines()[-_CODE_LINES:]).strip("\n"))
    legend = Text.assemble(
        (f"{ACCEPTED} accepted", "bold green"),
        "   ",
        (f"{BONUS} bonus", "bold cyan"),
        ": the target's token\n",
        "numbers: estimated probability of the token, and of its whole path\n",
        style="dim",
    )
    several = len(sources) > 1
    if several:
        legend.append("source: ").append(_legend(sources)).append("\n")
    drawn = rich_tree(step, text, with_sources=several)
    emitted = Text("\nThis step emitted: ", style="dim").append(
        " ".join(visible(text(token)) for token in step.emitted), style="bold"
    )
    return Panel(
        Group(legend, Text(lines, style="dim"), drawn, emitted),
        title=f"{title}: {len(step.tokens)} nodes, {len(step.accepted)} accepted",
        title_align="left",
        padding=(0, 1),
    )


def meaning(source: Source) -> str:
    """Return the source's name and what it is, for a legend."""
    return _LOOKS[source].mark + _LOOKS[source].about


def _legend(sources: Sequence[Source]) -> Text:
    looks = [_LOOKS[source] for source in sources]
    parts = [Text.assemble((each.mark, each.colour), each.about) for each in looks]
    return Text("   ").join(parts)


def _shown(children: list[int], accepted: list[int], most: int | None) -> list[int]:
    """Return up to ``most`` of a node's children: the accepted one, and the most valuable."""
    room = len(children) if most is None else most
    reserved = sum(child in accepted for child in children[room:])
    return [
        child for rank, child in enumerate(children) if rank < room - reserved or child in accepted
    ]


def _summary(step: TreeStep, nodes: Sequence[int]) -> str:
    """Return a line that stands for these nodes and all below them."""
    inside = set(nodes)
    for node, parent in enumerate(step.parents):
        if parent in inside:
            inside.add(node)
    below = len(inside) - len(nodes)
    deeper = f" with {below} below" if below else ""
    best = max(map(step.value, nodes))
    return f"… {len(nodes)} more{deeper}, value at most {_chance(best)}"


def _line(text: str, style: str = "") -> Text:
    return Text(text, style, no_wrap=True, overflow="ellipsis")


def _root_label(step: TreeStep, text: Detokenise) -> Text:
    label = _line(visible(text(step.root_token)), "bold")
    return label.append(f"  the last of {step.context_length} tokens", style="not bold dim")


def _label(step: TreeStep, node: int, text: Detokenise) -> Text:
    token = visible(text(step.tokens[node]))
    accepted = node in step.accepted
    label = _line(f"{ACCEPTED} {token}", "bold green") if accepted else _line(token)
    numbers = f"  {_chance(step.probability(node))}  {_chance(step.value(node))}"
    return label.append(numbers, style="not bold dim")


def _chance(probability: float) -> str:
    return "<0.001" if probability < 0.001 else f"{probability:.3f}"

"""A verified tree for the eye: as a renderable of rich, as Graphviz DOT."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.text import Text
from rich.tree import Tree

from dyntree_plugin.escape import escaped
from dyntree_plugin.tree.step import TreeStep

Detokenise = Callable[[int], str]
"""The text of one token, as it stands behind others."""

ACCEPTED = "✓"
BONUS = "+"
MAX_SIBLINGS = 6
_MAX_LABEL = 40

_VISIBLE = str.maketrans({" ": "·", "\n": "↵", "\t": "⇥", "\r": "␍"})


def visible(text: str) -> str:
    """``text`` on one line, with every space, line break and control character to be seen."""
    if not text:
        return "∅"
    shown = escaped(text.translate(_VISIBLE))
    return shown if len(shown) <= _MAX_LABEL else shown[: _MAX_LABEL - 1] + "…"


def rich_tree(step: TreeStep, text: Detokenise, max_siblings: int | None = MAX_SIBLINGS) -> Tree:
    """The tree as a renderable of rich.

    Every node shows its token, the estimated chance that it is accepted if its parent is, and its
    value: that of its whole path. Accepted nodes are bold and marked with ✓; the bonus token is a
    leaf of its own. Of more than ``max_siblings`` siblings (None: no limit) the least valuable
    become one line that counts them; accepted nodes always stay.
    """
    drawn = Tree(_root_label(step, text))
    branches = {-1: drawn}
    end = step.accepted[-1] if step.accepted else -1
    for entry in _walk(step, max_siblings):
        branch = branches[entry.parent]
        if entry.node is None:
            branch.add(Text(entry.summary(step), style="dim"))
        else:
            branches[entry.node] = branch.add(_label(step, entry.node, text))
    bonus = Text(f"{BONUS} {visible(text(step.bonus_token))}", style="bold cyan")
    branches[end].add(bonus.append("  bonus: the target's own token", style="not bold dim"))
    return drawn


def dot(step: TreeStep, text: Detokenise, name: str = "tree") -> str:
    """The tree in Graphviz's language, every node of it; accepted nodes are filled.

    ``name``: of the graph, an identifier of that language.
    """
    accepted = set(step.accepted)
    end = step.accepted[-1] if step.accepted else -1
    lines = [
        f"digraph {name} {{",
        "  node [shape=box, style=rounded, fontname=monospace];",
        f"  root [label={_quoted(text(step.root_token))}, penwidth=2];",
    ]
    for node, token in enumerate(step.tokens):
        numbers = f"\\n{_chance(step.probability(node))}  {_chance(step.value(node))}"
        label = _quoted(text(token), numbers)
        look = ', style="rounded,filled", penwidth=2' if node in accepted else ""
        lines.append(f"  n{node} [label={label}{look}];")
    lines.append(f"  bonus [label={_quoted(text(step.bonus_token))}, style=dashed];")
    for node, parent in enumerate(step.parents):
        look = " [penwidth=2]" if node in accepted else ""
        lines.append(f"  {_name(parent)} -> n{node}{look};")
    lines.append(f"  {_name(end)} -> bonus [style=dashed];")
    return "\n".join([*lines, "}", ""])


@dataclass(frozen=True, slots=True)
class _Entry:
    """A node to draw below ``parent``; or, without one, the ``left_out`` siblings there."""

    parent: int
    node: int | None = None
    left_out: tuple[int, ...] = ()

    def summary(self, step: TreeStep) -> str:
        best = max(map(step.value, self.left_out))
        inside = sum(1 for _ in _below(step, self.left_out))
        deeper = f" with {inside} below" if inside else ""
        return f"… {len(self.left_out)} more{deeper}, value at most {_chance(best)}"


def _walk(step: TreeStep, max_siblings: int | None) -> Iterator[_Entry]:
    """What to draw, parents first."""
    accepted = set(step.accepted)
    waiting = [-1]
    while waiting:
        parent = waiting.pop(0)
        children = step.children(parent)
        room = len(children) if max_siblings is None else max_siblings
        reserved = sum(child in accepted for child in children[room:])
        shown = [
            child
            for rank, child in enumerate(children)
            if rank < room - reserved or child in accepted
        ]
        for child in shown:
            yield _Entry(parent, child)
        if len(shown) < len(children):
            yield _Entry(parent, left_out=tuple(c for c in children if c not in shown))
        waiting.extend(shown)


def _below(step: TreeStep, nodes: tuple[int, ...]) -> Iterator[int]:
    inside = set(nodes)
    for node, parent in enumerate(step.parents):
        if parent in inside:
            inside.add(node)
            yield node


def _root_label(step: TreeStep, text: Detokenise) -> Text:
    label = Text(visible(text(step.root_token)), style="bold")
    return label.append(f"  the last of {step.context_length} tokens", style="not bold dim")


def _label(step: TreeStep, node: int, text: Detokenise) -> Text:
    token = visible(text(step.tokens[node]))
    if node in step.accepted:
        label = Text(f"{ACCEPTED} {token}", style="bold green")
    else:
        label = Text(token)
    numbers = f"  {_chance(step.probability(node))}  {_chance(step.value(node))}"
    return label.append(numbers, style="not bold dim")


def _chance(probability: float) -> str:
    return "<0.001" if probability < 0.001 else f"{probability:.3f}"


def _quoted(text: str, suffix: str = "") -> str:
    # Graphviz reads &lt; as HTML does.
    label = visible(text).replace("\\", "\\\\").replace('"', '\\"').replace("&", "&amp;")
    return f'"{label}{suffix}"'


def _name(node: int) -> str:
    return "root" if node < 0 else f"n{node}"

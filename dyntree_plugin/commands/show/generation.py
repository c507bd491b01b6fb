"""One request's trees, with everything needed to draw them, and the file format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from dyntree_plugin.commands.paths import read_text
from dyntree_plugin.tree.step import Source, TreeStep, sources_of


@dataclass(frozen=True)
class Generation:
    """A prompt, its completion, and the tree of every step.

    ``pieces``: the text of each token of prompt and completion; joined they are the whole text. A
    token that ends inside a character has an empty piece. ``texts``: the text of every token in a
    tree, by its id. ``chances``: whether a node's probability is the draft's, or an estimate that
    the target accepts the node. ``drafter``: whether ``draft`` is a draft model, or a head of the
    target.

    Raises:
        ValueError: if the trees do not belong to the text.
    """

    target: str
    draft: str
    dtype: str
    temperature: float
    top_p: float
    seed: int | None
    node_budget: int
    options: dict[str, Any]
    prompt_tokens: list[int]
    tokens: list[int]
    pieces: list[str]
    texts: dict[int, str]
    steps: list[TreeStep]
    chances: Literal["draft", "estimated"]
    drafter: Literal["draft", "head"] = "draft"
    format: Literal["dyntree-trace-2"] = "dyntree-trace-2"

    def __post_init__(self) -> None:
        text = [*self.prompt_tokens, *self.tokens]
        if len(self.pieces) != len(text):
            raise ValueError(f"{len(text)} tokens have {len(self.pieces)} pieces of text")
        for number, step in enumerate(self.steps):
            start = step.context_length
            if not 1 <= start <= len(text) or step.root_token != text[start - 1]:
                raise ValueError(f"steps[{number}] is not rooted in this text")
            # The last step may go beyond the end of the completion.
            continued = text[start : start + len(step.emitted)]
            if step.emitted[: len(continued)] != continued:
                raise ValueError(f"steps[{number}] does not emit this text")
            missing = {step.root_token, *step.tokens, *step.emitted} - self.texts.keys()
            if missing:
                raise ValueError(f"steps[{number}] has tokens without a text: {sorted(missing)}")

    @property
    def sources(self) -> list[Source]:
        """The sources of the trees' nodes."""
        return sources_of(self.steps)

    def text(self, token: int) -> str:
        return self.texts[token]

    def context(self, step: TreeStep) -> str:
        """Return the text up to a step's root, the root included."""
        return "".join(self.pieces[: step.context_length])


_FORM = TypeAdapter(Generation)


def save(generation: Generation, path: Path) -> None:
    path.write_bytes(_FORM.dump_json(generation, indent=1))


def load(path: Path) -> Generation:
    """Read what `save` has written.

    Raises:
        ValueError: naming the file and what is wrong with it.
    """
    try:
        return _FORM.validate_json(read_text("--from", path))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ValueError(
            f"--from {str(path)!r} is not a trace of `dyntree show --trace`: "
            f"{where}: {first['msg']}"
        ) from None

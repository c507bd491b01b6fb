"""Choose the chains of vLLM's to measure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dyntree_plugin.commands.loads.runs import Engine

Chains = Mapping[str, Sequence[int]]
"""Lengths of the chains to measure, by the name of their kind in `KINDS`."""

_DRAWN = {"draft_sample_method": "probabilistic"}


@dataclass(frozen=True)
class Kind:
    """Chains that differ only in length.

    An engine is called ``name`` and its length. ``first``: the lengths of a first answer, and
    ``lengths``: all. ``speculation``: its part of vLLM's ``speculative_config``; a method in there
    replaces the draft.
    """

    name: str
    first: tuple[int, ...]
    lengths: tuple[int, ...]
    speculation: Mapping[str, Any]

    @property
    def is_drawn(self) -> bool:
        """Whether its drafts are drawn from the draft's distribution."""
        return _DRAWN.items() <= self.speculation.items()


KINDS: Mapping[str, Kind] = {
    "greedy": Kind("chain", (3, 8), (1, 2, 3, 5, 8, 12), {}),
    # Block verification accepts no fewer of the same drafts.
    "probabilistic": Kind("probabilistic chain", (), (2, 3, 5, 8, 12), _DRAWN),
    # Block verification accepts greedy drafts with the probabilities of the standard one, so it is
    # measured with drawn drafts only.
    "block": Kind(
        "block chain",
        (3, 8),
        (2, 3, 5, 8, 12),
        {**_DRAWN, "rejection_sample_method": "block"},
    ),
    "n-gram": Kind(
        "n-gram",
        (8,),
        (4, 8, 16),
        {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 5},
    ),
}
"""Every kind of chain that vLLM has for a draft, and n-gram."""

OFF = "0"
"""Leaves out all chains."""
ALL = "all"
"""Measures all lengths of all kinds that can be measured."""

_ALONE = {OFF: "leaves all chains out", ALL: "measures all chains"}
_NO_DRAFT = "it drafts with a model, and with --method ngram there is none"
_PIECES = (
    "above temperature 0 the runner of vLLM's that it needs on a CPU fails if a prompt is read in "
    "pieces, as these --engine-arguments allow"
)


def chosen(
    given: Sequence[str] | None,
    temperatures: Sequence[float],
    *,
    draft: bool = True,
    pieces: bool = False,
) -> tuple[Chains, list[str]]:
    """Return the chains to measure, and notes on those that are left out.

    ``given``: values of ``--chain``; None for a few that can be measured. ``draft``: there is a
    model that drafts; without one a length is that of an n-gram chain. ``pieces``: prompts may be
    read in pieces on a CPU.

    Raises:
        ValueError: if a text is not a chain, or given chains cannot be measured.
    """
    chosen: dict[str, Sequence[int]] = dict.fromkeys(KINDS, ())
    against = {name: _reason_against(name, temperatures, draft, pieces) for name in KINDS}
    words = list(dict.fromkeys(given or ()))
    for word in {OFF, ALL} & {*words}:
        if len(words) > 1:
            raise ValueError(f"--chain {word} {_ALONE[word]}: give it alone")
    notes = []
    if given is None or words == [ALL]:
        for name, kind in KINDS.items():
            if not against[name]:
                chosen[name] = kind.lengths if words or not draft else kind.first
            elif against[name] != _NO_DRAFT:
                notes.append(f"Not measured: {kind.name}s ({against[name]}).")
    elif words != [OFF]:
        for word in words:
            name, length = _parsed(word, "greedy" if draft else "n-gram")
            if against[name]:
                raise ValueError(f"--chain {word}: {against[name]}")
            chosen[name] = (*chosen[name], length)
    if 0 in temperatures and any(chosen[name] for name in chosen if KINDS[name].is_drawn):
        notes.append("At temperature 0 drawn drafts are the greedy ones, and are not measured.")
    if given is None and draft:
        notes.append(f"A few of vLLM's chains; --chain {ALL} measures more kinds and lengths.")
    return chosen, notes


def _parsed(text: str, default: str) -> tuple[str, int]:
    """Return the kind of a chain, which is the ``default`` if none is named, and its length.

    Raises:
        ValueError: if it is none.
    """
    name, _, length = text.rpartition(":")
    name = name or default
    if name not in KINDS or not length.isdecimal() or int(length) < 1:
        raise ValueError(
            f"--chain {text!r} must be a length, such as 5, or KIND:LENGTH with a kind of "
            f"{', '.join(KINDS)}"
        )
    return name, int(length)


def _reason_against(name: str, temperatures: Sequence[float], draft: bool, pieces: bool) -> str:
    """Return why no chain of a kind can be measured; empty if it can."""
    looks_up = "method" in KINDS[name].speculation
    if not draft and not looks_up:
        return _NO_DRAFT
    if pieces and looks_up and any(temperatures):
        return _PIECES
    if KINDS[name].is_drawn and not any(temperatures):
        return "at temperature 0 these drafts are the greedy ones; give --temperature 1 to draw"
    return ""


def listed(chains: Chains) -> Iterator[tuple[str, int, Mapping[str, Any]]]:
    """Yield every chain's name, length, and part of vLLM's ``speculative_config``."""
    for name, lengths in chains.items():
        for tokens in lengths:
            yield f"{KINDS[name].name} of {tokens}", tokens, KINDS[name].speculation


def kind_of(engine: Engine) -> str:
    """Return the name of the kind of a chain."""
    speculation = engine.arguments.get("speculative_config", {})

    def agrees(kind: Kind) -> bool:
        return all(speculation.get(key) == value for key, value in kind.speculation.items())

    return [name for name, kind in KINDS.items() if agrees(kind)][-1]


def serves(engine: Engine, temperature: float) -> bool:
    """Return whether an engine is measured at a temperature.

    At 0 a drawn draft is the greedy one, and all verifications accept the same tokens.
    """
    return temperature > 0 or engine.kind != "chain" or not KINDS[kind_of(engine)].is_drawn

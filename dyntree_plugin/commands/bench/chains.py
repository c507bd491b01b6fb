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

    An engine is called ``name`` and its length. ``lengths``: the default. ``speculation``: its part
    of vLLM's ``speculative_config``; a method in there replaces the draft.
    """

    name: str
    lengths: tuple[int, ...]
    speculation: Mapping[str, Any]

    @property
    def is_drawn(self) -> bool:
        """Whether its drafts are drawn from the draft's distribution."""
        return _DRAWN.items() <= self.speculation.items()


KINDS: Mapping[str, Kind] = {
    "greedy": Kind("chain", (1, 2, 3, 5, 8, 12), {}),
    "probabilistic": Kind("probabilistic chain", (2, 3, 5, 8, 12), _DRAWN),
    # Block verification accepts greedy drafts with the probabilities of the standard one, so it is
    # measured with drawn drafts only.
    "block": Kind(
        "block chain",
        (2, 3, 5, 8, 12),
        {**_DRAWN, "rejection_sample_method": "block"},
    ),
    "n-gram": Kind(
        "n-gram",
        (4, 8, 16),
        {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 5},
    ),
}
"""Every kind of chain that vLLM has for a draft, and n-gram."""

OFF = "0"
"""Leaves out all chains."""


def chosen(given: Sequence[str] | None, temperatures: Sequence[float]) -> tuple[Chains, list[str]]:
    """Return the chains to measure, and notes on those that are left out.

    ``given``: values of ``--chain``; None for the default lengths of all kinds that can be
    measured.

    Raises:
        ValueError: if a text is not a chain, or given chains cannot be measured.
    """
    chosen: dict[str, Sequence[int]] = dict.fromkeys(KINDS, ())
    notes = []
    if given is None:
        for name, kind in KINDS.items():
            if reason := _reason_against(name, temperatures):
                notes.append(f"Not measured: {kind.name}s ({reason}).")
            else:
                chosen[name] = kind.lengths
    elif OFF in given and len(given) > 1:
        raise ValueError(f"--chain {OFF} leaves all chains out: give it alone")
    for text in dict.fromkeys(given or ()):
        if text == OFF:
            continue
        name, length = _parsed(text)
        if reason := _reason_against(name, temperatures):
            raise ValueError(f"--chain {text}: {reason}")
        chosen[name] = (*chosen[name], length)
    if 0 in temperatures and any(chosen[name] for name in chosen if KINDS[name].is_drawn):
        notes.append("At temperature 0 drawn drafts are the greedy ones, and are not measured.")
    return chosen, notes


def _parsed(text: str) -> tuple[str, int]:
    """Return the kind and the length of a chain.

    Raises:
        ValueError: if it is none.
    """
    name, _, length = text.rpartition(":")
    name = name or "greedy"
    if name not in KINDS or not length.isdecimal() or int(length) < 1:
        raise ValueError(
            f"--chain {text!r} must be a length, such as 5, or KIND:LENGTH with a kind of "
            f"{', '.join(KINDS)}"
        )
    return name, int(length)


def _reason_against(name: str, temperatures: Sequence[float]) -> str:
    """Return why no chain of a kind can be measured; empty if it can."""
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

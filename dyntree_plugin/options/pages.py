"""Write the help of the flag, and the tables of docs/options.md."""

from __future__ import annotations

from collections.abc import Sequence

from dyntree_plugin.options.options import DynTreeOptions
from dyntree_plugin.options.text import allowed, default_of, meaning

OF_THE_PAPERS = ("growth", "sampling", "rule", "threshold", "expansion", "acceptance")
"""Options that serving does not need."""


def help_text() -> str:
    """Return the help of ``--dyntree``."""
    lines = [
        f"- {name} ({allowed(name, field)}; default {default_of(field)}): {meaning(name, field)}"
        for name, field in DynTreeOptions.model_fields.items()
    ]
    return (
        "Speculate with a dynamic token tree. The value is a JSON object of options, {} for the "
        "defaults. Needs a --speculative-config. Only exactness, and rule, which follows "
        "from growth, change which tokens are emitted.\n\n" + "\n".join(lines)
    )


def markdown_tables() -> str:
    """Return the options as two Markdown tables: for serving, and for the papers' trees."""
    fields = DynTreeOptions.model_fields
    serving = [name for name in fields if name not in OF_THE_PAPERS]
    parts = (("## Serving", serving), ("## The papers' trees", OF_THE_PAPERS))
    return "\n\n".join(f"{heading}\n\n{_table(names)}" for heading, names in parts)


def _table(names: Sequence[str]) -> str:
    rows = [
        f"| `{name}` | {allowed(name, field)} | {default_of(field)} | {meaning(name, field)} |"
        for name, field in DynTreeOptions.model_fields.items()
        if name in names
    ]
    return "\n".join(["| option | allowed | default | meaning |", "|---|---|---|---|", *rows])

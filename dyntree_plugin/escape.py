"""Text that others wrote, as text: of models, servers and their users."""

from __future__ import annotations


def escaped(text: str, keep: str = "") -> str:
    r"""``text`` with every character that a terminal obeys or does not show as in Python's strings,
    such as ``\x1b`` and ``\u202e``, but for those to ``keep``."""
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )


def escaped_lines(text: str) -> str:
    """The same, with line breaks and tabs as they are."""
    return escaped(text, keep="\n\t")

"""Escape text of models, servers and users before it is printed."""

from __future__ import annotations


def escaped(text: str, keep: str = "") -> str:
    r"""Escape every character that a terminal obeys or does not show, as in ``\x1b``, ``\u202e``.

    Characters in ``keep`` stay as they are.
    """
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )


def escaped_lines(text: str) -> str:
    """Escape ``text``, but keep line breaks and tabs."""
    return escaped(text, keep="\n\t")

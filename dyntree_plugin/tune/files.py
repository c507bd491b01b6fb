"""Write files as a whole, and name the file if one cannot be written or read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

AGAIN = "delete it, and give the same command again, which makes it anew"

_MOST_REASON = 200


@contextmanager
def explained(message: str) -> Iterator[None]:
    """Raise a ValueError with this message, and the reason, for any exception of the block.

    Readers of damaged files and writers to full disks raise exceptions of all kinds.
    """
    try:
        yield
    except Exception as error:
        # The sentences and lines that libraries add are advice for programmers.
        first, *more = str(error).strip().splitlines() or [type(error).__name__]
        said = " ".join([first, more[0].strip()]) if more and first.endswith(":") else first
        reason = said.split(". ")[0][:_MOST_REASON]
        raise ValueError(f"{message} ({reason})") from error


def damaged(file: Path, remedy: str = AGAIN) -> str:
    """Return the message for a file that cannot be read."""
    return f"{str(file)!r} is damaged: {remedy}"


def part_of(file: Path) -> Path:
    """Return the path that is written before it replaces ``file``."""
    return file.with_suffix(".part")


@contextmanager
def whole(file: Path) -> Iterator[Path]:
    """Yield the path to write to; its content replaces the file once it is on the disk.

    If the process is killed before, or the machine stops, the file does not change.

    Raises:
        ValueError: if it cannot be written.
    """
    part = part_of(file)
    with explained(f"{str(file)!r} cannot be written"):
        file.parent.mkdir(parents=True, exist_ok=True)
        yield part
        with part.open("rb") as written:
            os.fsync(written.fileno())
        part.replace(file)

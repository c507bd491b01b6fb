"""Check files, folders and models that users name, before anything starts."""

from __future__ import annotations

import os
import re
from pathlib import Path

_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
"""Names of models on the Hugging Face Hub: a name, or an owner and a name."""


def read_text(option: str, path: Path) -> str:
    """Return the text of a file, without a byte order mark.

    Raises:
        ValueError: if it cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text("utf-8-sig")  # Windows' editors begin files with a byte order mark.
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8: {error.reason} at byte {error.start}"
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}"
    raise ValueError(f"{option} {str(path)!r} {problem}")


def check_new_file(option: str, path: Path | None) -> None:
    """Refuse a path at which a file cannot be written.

    Raises:
        ValueError: if it is a folder, or the folder above is missing or not writable.
    """
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{option} {str(path)!r} is a folder: give a file")
    if not path.parent.is_dir():
        raise ValueError(f"{option} {str(path)!r}: there is no folder {str(path.parent)!r}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{option} {str(path)!r} cannot be written: permission denied")
    if not path.exists():
        # A system of files may be writable by its permissions, and refuse a file.
        try:
            path.touch()
            path.unlink()
        except OSError as error:
            raise ValueError(
                f"{option} {str(path)!r} cannot be written: {error.strerror}"
            ) from None


def check_new_folder(option: str, path: Path) -> None:
    """Refuse a path at which a folder cannot be made.

    Raises:
        ValueError: if a file is in the way, or permission is missing.
    """
    there = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not there.is_dir():
        raise ValueError(f"{option} {str(path)!r}: {str(there)!r} is a file: give a folder")
    if not os.access(there, os.W_OK):
        raise ValueError(f"{option} {str(path)!r} cannot be written: permission denied")


def check_model(option: str, model: str | None) -> None:
    """Refuse what can neither be a model's folder nor a model's name.

    Raises:
        ValueError: naming the option and the value.
    """
    if model is None:
        return
    path = Path(model)
    if path.is_dir():
        if not any((path / name).is_file() for name in ("config.json", "params.json")):
            raise ValueError(f"{option} {model!r} is no model: the folder has no config.json")
    elif path.exists():
        raise ValueError(f"{option} {model!r} is a file: give the folder or the name of a model")
    elif not _NAME.fullmatch(model):
        raise ValueError(
            f"{option} {model!r} is no folder here, and no name of a model such as OWNER/NAME"
        )

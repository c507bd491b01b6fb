"""Compile functions with numba, and keep their machine code on disk.

numba's cache has four faults. It invalidates a function only if the file of that function
changes, although the machine code contains functions of other files. It numbers its files, so two
processes that compile at once may read each other's files. It fails on a damaged file. It fails if
it cannot write. Here the name of a folder is a digest of all sources that the machine code can come
from. The name of a file in it contains a digest of the function, its types and the CPU. So every
file that is found is valid, and no file is ever changed.

The folder is in ``$NUMBA_CACHE_DIR/dyntree``, else in the user's cache folder, else beside the
package.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import os
import pickle
import shutil
import sys
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import llvmlite  # type: ignore[import-untyped]
import numba  # type: ignore[import-untyped]
import numpy as np
from numba.core.caching import _Cache  # type: ignore[import-untyped]
from numba.core.compiler import CompileResult  # type: ignore[import-untyped]
from numba.core.dispatcher import Dispatcher  # type: ignore[import-untyped]
from numba.core.serialize import dumps  # type: ignore[import-untyped]

logger = logging.getLogger(__name__)

KEPT_FOLDERS = 8
"""Number of folders of other sources or numba versions to keep, the most recently used ones."""

_HERE = Path(__file__).parent
_CHECKSUM_BYTES = hashlib.sha256().digest_size


def compiled(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Compile like ``numba.njit`` with ``cache=True``, but with the cache of this module.

    The function may only use code from the folder of its file, from `dyntree_kernels` and from
    `dyntree_kernels.cpu`, because other sources are not in the digest.
    """
    if function is None:
        return functools.partial(compiled, **options)
    dispatcher = numba.njit(**options)(function)
    folder = _folder(Path(inspect.getfile(function)).parent)
    if folder is not None and isinstance(dispatcher, Dispatcher):
        dispatcher._cache = _MachineCode(function, folder)
    return dispatcher


class _MachineCode(_Cache):  # type: ignore[misc]
    """A numba cache for the machine code of one function, by the types of its arguments."""

    def __init__(self, function: Callable[..., Any], folder: Path) -> None:
        self._function = function
        self._folder = folder
        self._name = f"{Path(inspect.getfile(function)).stem}.{function.__qualname__}"
        self._enabled = True

    @property
    def cache_path(self) -> str:
        return str(self._folder)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        target_context.refresh()
        if not self._enabled:
            return None
        key = self._key(sig, target_context.codegen())
        try:
            kept = self._path(key).read_bytes()
        except OSError:
            return None
        checksum, record = kept[:_CHECKSUM_BYTES], kept[_CHECKSUM_BYTES:]
        if hashlib.sha256(record).digest() != checksum:
            return None
        key_of_kept, result = pickle.loads(record)
        if key_of_kept != key:
            return None
        return CompileResult._rebuild(target_context, *result)

    def save_overload(self, sig: Any, data: Any) -> None:
        # Dynamic globals, such as addresses, are valid only in this process.
        if not self._enabled or data.library.has_dynamic_globals:
            return
        key = self._key(sig, data.codegen)
        record = dumps((key, data._reduce()))
        path = self._path(key)
        partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
        try:
            # Another process may have removed the folder.
            self._folder.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(hashlib.sha256(record).digest() + record)
            partial.replace(path)
        except OSError as problem:
            with suppress(OSError):
                partial.unlink()
            _warn(f"{self._folder.parent}: {problem.strerror}")

    def flush(self) -> None:
        for path in self._folder.glob(f"{self._name}-*"):
            path.unlink(missing_ok=True)

    def enable(self) -> None:
        self._enabled = True

    def disable(self) -> None:
        self._enabled = False

    def _key(self, sig: Any, codegen: Any) -> tuple[Any, ...]:
        code, cells = self._function.__code__, self._function.__closure__ or ()
        enclosed = dumps(tuple(cell.cell_contents for cell in cells))
        return self._name, code.co_firstlineno, sig, codegen.magic_tuple(), enclosed

    def _path(self, key: tuple[Any, ...]) -> Path:
        return self._folder / f"{self._name}-{hashlib.sha256(repr(key).encode()).hexdigest()}.nbc"


@functools.cache
def _folder(package: Path) -> Path | None:
    """Return the folder for the machine code of a package's functions, or None if there is none."""
    digest, problems = _digest(package), []
    for base in _bases(package):
        try:
            return _open_folder(base / digest)
        except OSError as problem:
            problems.append(f"{base}: {problem.strerror}")
    _warn(problems[0])
    return None


def _open_folder(folder: Path) -> Path:
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        _remove_old(folder.parent)
    with suppress(OSError):  # the folder may be read-only
        os.utime(folder)
    return folder


def _remove_old(base: Path) -> None:
    with suppress(OSError):
        folders = sorted(base.iterdir(), key=lambda each: each.stat().st_mtime)
        for folder in folders[: -KEPT_FOLDERS - 1]:
            shutil.rmtree(folder, ignore_errors=True)


def _bases(package: Path) -> list[Path]:
    if numba.config.CACHE_DIR:
        return [Path(numba.config.CACHE_DIR) / "dyntree"]
    bases = [package / "__pycache__"]
    with suppress(RuntimeError):  # the user may have no home folder
        bases.insert(0, Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"))
    return [base / "dyntree" / "kernels" for base in bases]


def _digest(package: Path) -> str:
    """Hash the sources of the package, those of this package, and the versions of the compiler."""
    versions = [each.__version__ for each in (numba, llvmlite, np)]
    digest = hashlib.sha256(repr([sys.implementation.cache_tag, *versions]).encode())
    for folder in dict.fromkeys((_HERE.parent, _HERE, package)):
        for path in sorted(folder.glob("*.py")):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"\n{folder.name}/{path.name} {content}".encode())
    return digest.hexdigest()[:32]


@functools.cache
def _warn(reason: str) -> None:
    logger.warning(
        "The machine code of the CPU kernels cannot be stored (%s), so every start of an engine "
        "compiles it again, for about a minute. Set NUMBA_CACHE_DIR to a writable folder.",
        reason,
    )

"""Import vLLM's FlashInfer backend on a machine without FlashInfer."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Absent:
    """What nobody uses."""


class _Library(ModuleType):
    def __init__(self, name: str, contents: Mapping[str, Any]) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)
        self._contents = contents

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._contents.get(name, Absent)


def vllms_backend(contents: Mapping[str, Any] | None = None) -> Any:
    """Return vLLM's module, for which ``contents`` are all that FlashInfer has.

    FlashInfer is absent again afterwards, since vLLM and dyntree ask whether it is there.
    """
    import vllm.utils.flashinfer  # noqa: F401  # asks when it is imported

    names = ["flashinfer", *(f"flashinfer.{part}" for part in ("decode", "prefill", "utils"))]
    sys.modules.update({name: _Library(name, contents or {}) for name in names})
    try:
        from vllm.v1.attention.backends import flashinfer
    finally:
        for name in names:
            del sys.modules[name]
    return flashinfer

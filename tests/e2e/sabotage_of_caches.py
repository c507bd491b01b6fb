"""Ways to break one mechanism of quantised caches at a time; `sabotage` says more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from sabotage_of_windows import other_features


@contextmanager
def scales_of_one(runner: Any) -> Iterator[None]:
    with other_features(lambda of: {"key_scale": None, "value_scale": None}):
        yield


@contextmanager
def swapped_scales(runner: Any) -> Iterator[None]:
    with other_features(lambda of: {"key_scale": of.value_scale, "value_scale": of.key_scale}):
        yield


@contextmanager
def move_without_a_byte(runner: Any) -> Iterator[None]:
    """Leave the first byte of every head's value where an accepted row is moved to."""
    from dyntree_kernels.cpu.kv_move import KVMover

    stock = KVMover.__call__

    def call(self: Any, source: Any, target: Any) -> None:
        size = self._caches[1][0].shape[2]
        slots = target[source >= 0]
        at = slots // size, slice(None), slots % size, 0
        kept = [values[at].clone() for values in self._caches[1]]
        stock(self, source, target)
        for values, bytes_ in zip(self._caches[1], kept, strict=True):
            values[at] = bytes_

    with mock.patch.object(KVMover, "__call__", call):
        yield


BROKEN = (scales_of_one, swapped_scales, move_without_a_byte)

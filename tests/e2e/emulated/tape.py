"""A replacement of a CUDA graph: record operations with their addresses, and execute them again.

A replay runs no Python of the engine, so values that the host computed at capture stay as they
were. Memory that was allocated within the capture holds garbage before a replay. It holds garbage
after the replay too unless the engine keeps a tensor in it, because other graphs may use the same
pool. Memory that was allocated elsewhere must still exist.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only

RUBBISH = 0xFF
"""Value of every garbage byte: NaN as a float, -1 as an integer."""

aten = torch.ops.aten
_UNWRITTEN = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
_WAITING = {aten.item, aten._local_scalar_dense, aten.is_nonzero, aten.equal}
_INDEXING = {aten.index, aten.index_put, aten.index_put_}


class Tape(TorchDispatchMode):
    """Record operations while it is entered; `replay` executes them again."""

    recording: ClassVar[Tape | None] = None
    replaying: ClassVar[Tape | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Callable[[], Any]] = []
        # Storages by the address of their object: allocated within the capture, and elsewhere.
        self._own: dict[int, torch.UntypedStorage] = {}
        self._others: dict[int, StorageWeakRef] = {}
        self._numbers: list[torch.UntypedStorage] = []

    def __enter__(self) -> Self:
        Tape.recording = self
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        Tape.recording = None
        super().__exit__(*error)
        self._spoil()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten.lift_fresh.default:  # makes a tensor from host memory
            return func(*args, **kwargs)
        _refuse_waiting(func, args, kwargs)
        arguments = tree_map_only(torch.Tensor, self._at, (args, kwargs))
        given = _storages((args, kwargs))
        found = func(*args, **kwargs)
        into = [self._new(each, given) for each in tree_flatten(found)[0]]
        if func in _UNWRITTEN:
            found.zero_()  # no kernel runs during a capture: readers need valid indices
        else:
            self.steps.append(partial(_again, partial(func, *arguments[0], **arguments[1]), into))
        return found

    def launch(self, kernel: Callable[..., None], args: tuple[Any, ...], kwargs: Any) -> None:
        """Record a kernel launch without running it."""
        with _disable_current_modes():
            own_args, own_kwargs = tree_map_only(torch.Tensor, self._at, (args, kwargs))
            self.steps.append(partial(kernel, *own_args, **own_kwargs))

    @torch.inference_mode()
    def replay(self) -> None:
        if any(storage.expired() for storage in self._others.values()):
            raise RuntimeError("replayed a graph whose memory was freed")
        self._spoil()
        Tape.replaying = self
        for step in self.steps:
            step()
        Tape.replaying = None
        self._spoil(kept=True)

    def _at(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an alias of the same memory that does not keep it alive."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._own and storage._cdata not in self._others:
            self._others[storage._cdata] = StorageWeakRef(storage)
            if not tensor.dim():  # may be a number of the host, which a graph keeps
                self._numbers.append(storage)
        return _alias(tensor)

    def _new(self, found: Any, given: set[int]) -> torch.Tensor | None:
        """Return where a replay must write this result; None if the result is one of the
        arguments."""
        if not isinstance(found, torch.Tensor):
            return None
        storage = found.untyped_storage()
        if storage._cdata in given:
            return None
        self._own.setdefault(storage._cdata, storage)
        return _alias(found)

    def _spoil(self, kept: bool = False) -> None:
        """Fill own memory with garbage. With ``kept``, leave out memory that holds a tensor of the
        engine."""
        with _disable_current_modes():
            for storage in self._own.values():
                used = torch._C._storage_Use_Count(storage._cdata) > 1  # type: ignore[attr-defined]
                if storage.nbytes() and not (kept and used):
                    ctypes.memset(storage.data_ptr(), RUBBISH, storage.nbytes())


def _again(call: Callable[[], Any], into: list[torch.Tensor | None]) -> None:
    for value, place in zip(tree_flatten(call())[0], into, strict=True):
        if place is not None:
            place.copy_(value)


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return tensor.detach()
    at = (ctypes.c_byte * storage.nbytes()).from_address(storage.data_ptr())
    memory = torch.frombuffer(at, dtype=torch.uint8).untyped_storage()
    alias = torch.empty(0, dtype=tensor.dtype)
    return alias.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())


def _storages(values: Any) -> set[int]:
    return {
        each.untyped_storage()._cdata
        for each in tree_flatten(values)[0]
        if isinstance(each, torch.Tensor)
    }


def _refuse_waiting(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise for operations that no stream can capture.

    They make the host wait, or copy from host memory.
    """
    packet, tags = func.overloadpacket, func.tags
    if packet in _INDEXING:
        masks = [index for index in args[1] if index is not None and index.dtype is torch.bool]
        filled = packet is not aten.index and args[2].numel() == 1 and len(args[1]) == 1
        waits = bool(masks) and not filled
    elif packet is aten.repeat_interleave:
        waits = isinstance(args[-1], torch.Tensor) and kwargs.get("output_size") is None
    else:
        dependent = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
        waits = packet in _WAITING or not dependent.isdisjoint(tags)
    if waits:
        raise RuntimeError(f"{func} cannot be captured")

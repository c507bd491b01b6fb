"""A stand-in for offloaded weights: a virtual link that delivers the target's layers slowly.

On a CPU the weights are in the host's memory already, and vLLM's offloaders do nothing or fail.
Here every layer waits, asleep, until a link of a given speed would have delivered it. Nothing is
copied, so what is computed stays the same.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from vllm.model_executor import offloader
from vllm.model_executor.offloader import BaseOffloader

_MAKERS = (
    offloader.__name__,
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.worker.gpu_model_runner",
)
"""Modules of vLLM with a ``create_offloader``: where it comes from, and both runners."""


class VirtualLink:
    """Delivers one thing after another, at so many bytes per second."""

    def __init__(
        self,
        bytes_per_second: float,
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.bytes_per_second = bytes_per_second
        self._now, self._sleep = now, sleep
        self._free = now()

    def send(self, size: int) -> float:
        """Queue so many bytes; return the time at which they have arrived."""
        self._free = max(self._free, self._now()) + size / self.bytes_per_second
        return self._free

    def wait(self, until: float) -> None:
        """Sleep until that time, so that no core is busy."""
        while (left := until - self._now()) > 0:
            self._sleep(left)


class LinkedWeights(BaseOffloader):
    """Layers that come over a `VirtualLink` before every use, as with vLLM's `PrefetchOffloader`.

    Its rules: ``slots`` layers have room on the device (``--offload-prefetch-step``). A layer runs
    when it has arrived. When it has run, the link starts to deliver the layer that follows in its
    slot. The first layers of the next forward are therefore under way while the engine samples and
    drafts. Layers of a second model, for which vLLM's offloader has no room, share the link.
    """

    def __init__(self, link: VirtualLink, slots: int) -> None:
        self.link = link
        self.models: list[list[int]] = []
        """Bytes of the layers of each model that vLLM offered."""
        self._slots = slots
        self._first: list[Callable[[], None]] = []

    def wrap_modules(
        self, modules_generator: Generator[nn.Module, None, None], prefix: str = ""
    ) -> list[nn.Module]:
        layers = list(modules_generator)
        slots = min(self._slots, len(layers))
        # At this point no kernel has packed the weights yet.
        sizes = [_bytes_of(layer) for layer in layers]
        self.models.append(sizes)
        arrivals = [0.0] * len(layers)

        def send(number: int) -> None:
            arrivals[number] = self.link.send(sizes[number])

        def wait(number: int) -> None:
            self.link.wait(arrivals[number])

        for number, layer in enumerate(layers):
            after = functools.partial(send, following(number, slots, len(layers)))
            layer.forward = _between(functools.partial(wait, number), layer.forward, after)
        self._first += [functools.partial(send, number) for number in range(slots)]
        return layers

    def post_init(self) -> None:
        """Begin with the first layers; vLLM calls it when the engine's models are loaded."""
        for send in self._first:
            send()


def following(layer: int, slots: int, layers: int) -> int:
    """Return the layer that comes next into the slot of a layer that has run."""
    return layer + slots if layer + slots < layers else layer % slots


@contextmanager
def linked(gb_per_second: float) -> Iterator[None]:
    """Have an engine that starts in this process get its layers over a link of this speed.

    The engine's ``offload_prefetch_step`` is the number of layers that the device has room for.

    Raises:
        ValueError: for an engine whose weights no link of this process can delay.
    """
    if gb_per_second <= 0:
        raise ValueError(f"--weights-at {gb_per_second:g} must be above 0, in GB per second")
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        raise ValueError(
            "--weights-at is for engines on a CPU: on a GPU offload the weights themselves, by "
            """--engine-arguments '{"offload_group_size": 1}'"""
        )

    def create(offload_config: Any) -> LinkedWeights:
        link = VirtualLink(gb_per_second * 1e9)
        return LinkedWeights(link, offload_config.prefetch.offload_prefetch_step)

    stock = offloader.create_offloader
    _set_maker(create)
    try:
        yield
    finally:
        _set_maker(stock)
    if not isinstance(offloader.get_offloader(), LinkedWeights):
        raise ValueError(
            "--weights-at is for engines of one process: leave tensor_parallel_size and the like "
            "out of --engine-arguments"
        )


def note(gb_per_second: float, slots: int) -> str:
    """Return what the link is, and what it is not, for a result."""
    return (
        f"Offloaded weights are simulated: in every step of every engine a virtual link of "
        f"{gb_per_second:g} GB/s delivers the target's layers, with room for {slots} of them at a "
        "time, by the rules of vLLM's prefetching (--offload-group-size 1). Nothing is copied; "
        "layers wait. The draft, the embeddings and the output layer are on the device."
    )


def _set_maker(create: Callable[[Any], BaseOffloader]) -> None:
    """Set what vLLM's runners make offloaders with, be they imported already or not."""
    for name in _MAKERS:
        if name in sys.modules:
            vars(sys.modules[name])["create_offloader"] = create


def _between(
    before: Callable[[], None], forward: Callable[..., Any], after: Callable[[], None]
) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        before()
        found = forward(*args, **kwargs)
        after()
        return found

    return wrapped


def _bytes_of(module: nn.Module) -> int:
    return sum(each.numel() * each.element_size() for each in module.parameters())

"""Drafts stay on the device while vLLM offloads the target's weights to the host's memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.model_executor.offloader import NoopOffloader, get_offloader, set_offloader


@contextmanager
def on_device() -> Iterator[None]:
    """Load models outside of vLLM's offloader, which is back afterwards.

    vLLM offers the layers of every model to one offloader. `PrefetchOffloader` fails an assertion
    at the second model. `UVAOffloader` moves the draft with what the target leaves of
    ``cpu_offload_gb``, so that each draft forward reads its weights over the bus.
    """
    engines = get_offloader()
    set_offloader(NoopOffloader())
    try:
        yield
    finally:
        set_offloader(engines)


def keep_draft_on_device(runner: Any) -> None:
    """Have vLLM's speculator load its draft on the device, if the ``runner`` has one.

    Needed to compare trees with vLLM's chains: otherwise these do not start, or draft more slowly.
    """
    speculator = runner.speculator
    if hasattr(speculator, "load_draft_model"):
        speculator.load_draft_model = on_device()(speculator.load_draft_model)

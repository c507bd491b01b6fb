"""Check how vLLM would offload the target's weights, before any of them load.

Drafts stay on the device (`engine/offloading.py`). This module imports nothing of vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from dyntree_plugin.admission import weights

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Backend = Literal["prefetch", "uva"]

TILE = 64
"""Rows of a block of a matrix product, at least. With UVA each block reads the weights over the bus
again; prefetching copies a layer once, whatever its rows."""


@dataclass(frozen=True)
class Offloading:
    """Where the target's weights are, in bytes of one device.

    ``target``: all weights. ``moved``: those in the host's memory. ``most``: those that can be
    moved. ``buffers``: room on the device for layers that are being copied.
    """

    backend: Backend
    target: int
    moved: int
    most: int
    buffers: int


def backend_of(offload_config: Any) -> Backend | None:
    """Return the backend that vLLM chooses; None if it offloads nothing."""
    backend: str = offload_config.offload_backend
    if backend == "auto":
        backend = "prefetch" if offload_config.prefetch.offload_group_size else "uva"
    if backend == "prefetch" and offload_config.prefetch.offload_group_size:
        return "prefetch"
    return "uva" if backend == "uva" and offload_config.uva.cpu_offload_gb else None


def placed(vllm_config: VllmConfig) -> Offloading | None:
    """Return where the target's weights will be; None without offloading, or with unknown sizes.

    With ``offload_params`` or ``cpu_offload_params``, ``moved`` is an upper bound.
    """
    backend = backend_of(vllm_config.offload_config)
    sizes = None if backend is None else weights.read(vllm_config.model_config)
    if backend is None or sizes is None or not sizes.layers:
        return None
    parallel = vllm_config.parallel_config
    layers = [size // parallel.tensor_parallel_size for size in sizes.layers]
    # Stages of a pipeline have about equal shares of the layers.
    stages = parallel.pipeline_parallel_size
    most = sum(layers) // stages
    target = sizes.total // parallel.tensor_parallel_size // stages
    if backend == "uva":
        limit = int(vllm_config.offload_config.uva.cpu_offload_gb * 2**30)
        return Offloading(backend, target, min(limit, most), most, 0)
    chosen = _prefetched(vllm_config.offload_config.prefetch, layers)
    slots = min(vllm_config.offload_config.prefetch.offload_prefetch_step, len(chosen))
    buffers = slots * max(chosen, default=0)
    return Offloading(backend, target, sum(chosen) // stages, most, buffers)


def _prefetched(prefetch: Any, layers: list[int]) -> list[int]:
    """Return the sizes of the layers that are copied: the last of every group."""
    size, last = prefetch.offload_group_size, prefetch.offload_num_in_group
    return [each for number, each in enumerate(layers) if number % size >= size - last]


def refusals(vllm_config: VllmConfig, device_type: str) -> Iterator[str]:
    """Yield why the engine cannot offload like this."""
    backend = backend_of(vllm_config.offload_config)
    if device_type == "cpu" and backend == "prefetch":
        size = vllm_config.offload_config.prefetch.offload_group_size
        yield (
            f"offload_group_size={size} is for a GPU: on a CPU the weights are in the host's "
            "memory already; leave it out"
        )
        return
    plan = None if device_type == "cpu" else placed(vllm_config)
    if plan is None:
        return
    wanted = plan.moved * _ranks_of_host(vllm_config.parallel_config)
    if wanted > (memory := _host_memory().total):
        yield (
            f"{_named(vllm_config, plan.backend)} moves {gib(wanted)} of the target's weights to "
            f"the host's memory, which is {gib(memory)}: offload less"
        )


def advice(vllm_config: VllmConfig, device_type: str) -> Iterator[str]:
    """Yield warnings about offloading options that do not do what they seem to."""
    backend = backend_of(vllm_config.offload_config)
    if backend is None:
        return
    named = _named(vllm_config, backend)
    if device_type == "cpu":
        yield f"{named} does nothing on a CPU: the weights are in the host's memory already."
        return
    plan = placed(vllm_config)
    if plan is not None:
        yield from _unlike_wanted(vllm_config, plan, named)
    rows = 1 + vllm_config.num_speculative_tokens
    if backend == "uva" and rows > TILE:
        yield (
            f"{named} suits small trees: a step of {rows} rows may read the offloaded weights up "
            f"to {-(-rows // TILE)} times. --offload-group-size copies each layer once, whatever "
            "the rows."
        )


def _unlike_wanted(vllm_config: VllmConfig, plan: Offloading, named: str) -> Iterator[str]:
    if not plan.moved:
        yield (
            f"{named} offloads nothing: the target has "
            f"{vllm_config.model_config.get_total_num_hidden_layers()} layers, and the last "
            "offload_num_in_group of every whole group are offloaded."
        )
    gigabytes = vllm_config.offload_config.uva.cpu_offload_gb
    if plan.backend == "uva" and gigabytes * 2**30 > plan.most:
        yield (
            f"{named} is more than the {gib(plan.most)} of the target's layers: all of them are "
            "offloaded, and the draft is not."
        )
    wanted = plan.moved * _ranks_of_host(vllm_config.parallel_config)
    free = _host_memory().available
    if wanted > free:
        yield f"{named} needs {gib(wanted)} of the host's memory, of which {gib(free)} are free."


def gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def _ranks_of_host(parallel: Any) -> int:
    """Return the least number of a model's ranks that share this host's memory."""
    if parallel.distributed_executor_backend == "ray":
        return 1  # It may place each rank on another host.
    ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    return max(1, int(ranks // parallel.nnodes))


def _named(vllm_config: VllmConfig, backend: Backend) -> str:
    """Return the option that asks for offloading, with its value."""
    config = vllm_config.offload_config
    if backend == "uva":
        return f"cpu_offload_gb={config.uva.cpu_offload_gb:g}"
    return f"offload_group_size={config.prefetch.offload_group_size}"


def _host_memory() -> Any:
    import psutil  # type: ignore[import-untyped]

    return psutil.virtual_memory()

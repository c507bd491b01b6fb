"""Say what fits on the device if the target's weights are offloaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from dyntree_plugin.admission import offloading, weights
from dyntree_plugin.admission.offloading import Offloading, gib
from dyntree_plugin.commands.doctor.checks import device_type
from dyntree_plugin.commands.doctor.report import Check
from dyntree_plugin.engine.configuration import further_drafts
from dyntree_plugin.options.methods import WITHOUT_DRAFT

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig, VllmConfig

NAME = "offloading"


def checks(config: VllmConfig) -> Iterator[Check]:
    """Check an admitted configuration; nothing if it offloads nothing."""
    if offloading.backend_of(config.offload_config) is None:
        return
    kind = device_type()
    for line in offloading.advice(config, kind):
        yield Check(NAME, "warn", line)
    if kind == "cpu":
        return
    placed = offloading.placed(config)
    if placed is None:
        unknown = f"the weights of {config.model_config.model} are not on this machine"
        yield Check(NAME, "ok", f"{unknown}, so that what fits is not known")
        return
    from vllm.platforms import current_platform

    yield fit(config, placed, current_platform.get_device_total_memory())


def fit(config: VllmConfig, placed: Offloading, memory: int) -> Check:
    """Say what is left for the KV cache of a device with ``memory`` bytes."""
    usable = int(memory * config.cache_config.gpu_memory_utilization)
    drafts = sum(_drafts(config))
    stays = placed.target - placed.moved
    left = usable - stays - placed.buffers - drafts
    tokens = max(left, 0) // _kv_bytes(config)
    says = (
        f"{placed.backend}: {gib(placed.moved)} of the target's {gib(placed.target)} are in the "
        f"host's memory. Of {gib(usable)} on the device, {gib(stays)} of the target, "
        f"{gib(placed.buffers)} of buffers and {gib(drafts)} of drafts leave {gib(left)} for "
        f"activations and the KV cache: at most {tokens} tokens"
    )
    longest = config.model_config.max_model_len
    if tokens >= longest:
        return Check(NAME, "ok", says)
    advice = f"a request may have max_model_len={longest} tokens: offload more, or lower it"
    return Check(NAME, "warn", says, advice)


def _drafts(config: VllmConfig) -> Iterator[int]:
    """Yield the bytes on one device of every draft that has files."""
    for speculation in _speculations(config):
        draft = speculation.draft_model_config
        if speculation.method != "mtp" and (sizes := weights.read(draft)) is not None:
            yield sizes.total // config.parallel_config.tensor_parallel_size


def _speculations(config: VllmConfig) -> Iterator[SpeculativeConfig]:
    speculation = config.speculative_config
    if speculation is None or speculation.method in WITHOUT_DRAFT:
        return
    yield speculation
    yield from further_drafts(speculation)


def _kv_bytes(config: VllmConfig) -> int:
    """Return the bytes of one token in the KV caches of target and drafts."""
    models = [config.model_config, *(each.draft_model_config for each in _speculations(config))]
    return sum(_kv_bytes_of(model, config.parallel_config) for model in models)


def _kv_bytes_of(model: ModelConfig, parallel: ParallelConfig) -> int:
    element = getattr(torch, str(model.dtype).removeprefix("torch.")).itemsize
    heads, layers = model.get_num_kv_heads(parallel), model.get_num_layers(parallel)
    return int(2 * layers * heads * model.get_head_size() * element)

"""KV connectors that keep committed blocks in a folder, and what breaks them.

``kv_connector_extra_config["folder"]`` names the folder. A block's file is named after the tokens
up to its end. In layers with states, a block holds those at its end; vLLM's block 0 stands for the
ends at which a request has none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

STATES = " has states"
"""The name of a file beside a block's ends like this if the block has states."""
Blocks = list[tuple[str, tuple[int, ...]]]
"""Names of files, and the block of each KV cache group."""


@dataclass
class Transfers(KVConnectorMetadata):
    loads: Blocks = field(default_factory=list)
    loading: set[str] = field(default_factory=set)
    """The requests that wait for these loads."""
    saves: Blocks = field(default_factory=list)
    written: list[tuple[int, ...]] = field(default_factory=list)
    """The blocks of the step's rows."""


class BlockStore(KVConnectorBase_V1, SupportsHMA):
    """Saves a block in the step after which vLLM knows all of its tokens.

    Blocks are loaded before a step of their request begins, if they hold states, and within its
    first step otherwise.
    """

    saves_after_verification = True
    loads_states_before_a_step = True
    before_a_step = True

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._folder = Path(vllm_config.kv_transfer_config.get_from_extra_config("folder", None))
        self._size = vllm_config.cache_config.block_size
        self._with_states = kv_cache_config.has_mamba_layers
        self._before_a_step = self._with_states and self.before_a_step
        self._group = {
            name: number
            for number, group in enumerate(kv_cache_config.kv_cache_groups)
            for name in group.layer_names
        }
        # The scheduler's side.
        self._requests: dict[str, Any] = {}
        self._blocks: dict[str, list[list[int]]] = {}
        self._saved: dict[str, int] = {}
        self._loads: Blocks = []
        self._loading: set[str] = set()
        # The worker's side.
        self._caches: dict[str, list[torch.Tensor]] = {}

    def _named(self, request: Any, blocks: Any, first: int, last: int) -> Iterator[Any]:
        """Give the names and blocks of a request's blocks ``first`` to ``last`` - 1."""
        for number in range(first, last):
            tokens = str([*request.all_token_ids[: (number + 1) * self._size]])
            name = hashlib.sha256(tokens.encode()).hexdigest()
            yield name, tuple(group[number] for group in blocks) if blocks else ()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        first, last = num_computed_tokens // self._size, (request.num_tokens - 1) // self._size
        stored = first
        for number, (name, _) in enumerate(self._named(request, None, first, last), first + 1):
            if not (self._folder / name).exists():
                break
            if (self._folder / f"{name}{STATES}").exists() or not self._with_states:
                stored = number
        found = stored * self._size - num_computed_tokens
        return found, found > 0 and self._before_a_step

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._requests[request.request_id] = request
        if num_external_tokens:
            found = blocks.get_block_ids()
            last = (request.num_computed_tokens + num_external_tokens) // self._size
            first = last - num_external_tokens // self._size
            self._loads += self._named(request, found, first, last)
            if self._before_a_step:
                self._loading.add(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> Transfers:
        computed = {}
        for new in scheduler_output.scheduled_new_reqs:
            self._blocks[new.req_id] = [[*group] for group in new.block_ids]
            computed[new.req_id] = new.num_computed_tokens
        cached = scheduler_output.scheduled_cached_reqs
        for name, blocks, tokens in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            computed[name] = tokens
            if name in cached.resumed_req_ids:
                self._blocks[name] = [[] for _ in self._blocks[name]]
            for group, more in zip(self._blocks[name], blocks or (), strict=bool(blocks)):
                group.extend(more)
        found = Transfers(loads=self._loads, loading=self._loading)
        self._loads, self._loading = [], set()
        for name, rows in scheduler_output.num_scheduled_tokens.items():
            request, blocks, first = (
                self._requests[name],
                self._blocks[name],
                self._saved.get(name, 0),
            )
            end = computed[name] + rows
            last = min(end, request.num_tokens) // self._size
            found.saves += self._named(request, blocks, first, last)
            touched = range(computed[name] // self._size, (end - 1) // self._size + 1)
            found.written += [tuple(group[number] for group in blocks) for number in touched]
            self._saved[name] = max(first, last)
        return found

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        for known in (self._requests, self._blocks, self._saved):
            known.pop(request.request_id, None)
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        return self.request_finished(request, block_ids)

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._caches = {
            name: [cache] if isinstance(cache, torch.Tensor) else [*cache]
            for name, cache in kv_caches.items()
            if name in self._group
        }

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        for name, blocks in self._get_connector_metadata().loads:
            stored = torch.load(self._folder / name)
            for layer, caches in self._caches.items():
                if block := blocks[self._group[layer]]:
                    for cache, parts in zip(caches, stored.get(layer, ()), strict=False):
                        cache[block] = parts

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        return None, {*self._get_connector_metadata().loading}

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any
    ) -> None: ...

    def wait_for_save(self) -> None:
        for name, blocks in self._get_connector_metadata().saves:
            states = self._folder / f"{name}{STATES}"
            if states.exists():
                continue
            read = {layer: self._parts(layer, blocks) for layer in self._caches}
            torch.save(read, self._folder / name)
            if all(blocks):
                states.touch()

    def _parts(self, layer: str, blocks: tuple[int, ...]) -> list[torch.Tensor]:
        return [cache[blocks[self._group[layer]]].clone() for cache in self._caches[layer]]


class WithinAStep(BlockStore):
    """Loads states within the first step of their request, whatever it declares."""

    before_a_step = False


class EarlyStore(BlockStore):
    """Takes the blocks of a step's rows at the end of the forward, as layer-wise saves do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._taken: dict[tuple[str, int], list[torch.Tensor]] = {}

    def finish_forward(self) -> None:
        for blocks in self._get_connector_metadata().written:
            for layer in self._caches:
                taken = super()._parts(layer, blocks)
                self._taken[layer, blocks[self._group[layer]]] = taken

    def _parts(self, layer: str, blocks: tuple[int, ...]) -> list[torch.Tensor]:
        taken = self._taken.get((layer, blocks[self._group[layer]]))
        return super()._parts(layer, blocks) if taken is None else taken

"""When other requests may find states that a pipeline's earlier stages store later."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)
from vllm.v1.request import Request

from dyntree_plugin.engine.scheduler import AsyncTreeScheduler, TreeCounting

BLOCK = 4


def manager(stages: int) -> Any:
    """Make a scheduler's manager of the blocks of an attention layer and of a recurrent layer."""
    attention = FullAttentionSpec(BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    states = MambaSpec(BLOCK, shapes=((1,),), dtypes=(torch.float32,), mamba_cache_mode="align")
    groups = [KVCacheGroupSpec([name], spec) for name, spec in (("a", attention), ("s", states))]

    def begin(scheduler: Any) -> None:
        scheduler.kv_cache_manager = KVCacheManager(KVCacheConfig(32, [], groups), 64, BLOCK, BLOCK)
        scheduler.need_mamba_block_aligned_split, scheduler.pp_size = True, stages

    with mock.patch.object(TreeCounting, "__init__", begin):
        return AsyncTreeScheduler().kv_cache_manager


def request(name: str, tokens: list[int]) -> Request:
    hasher = get_request_block_hasher(BLOCK, sha256)
    return Request(name, tokens, SamplingParams(max_tokens=9), None, block_hasher=hasher)


@pytest.mark.parametrize("stages", [1, 2])
def test_an_earlier_stages_state_is_found_once_its_step_has_an_output(stages: int) -> None:
    """The root of a tree completes a block. Control: with one stage, the next step finds it."""
    init_none_hash(sha256)
    of_blocks = manager(stages)

    def found() -> int:
        """Count the tokens of a longer prompt that are in the cache, in a new step."""
        of_blocks.new_step_starts()
        return int(of_blocks.get_computed_blocks(request("next", [*range(9)]))[1])

    decoding = request("decoding", [*range(2 * BLOCK - 1)])
    for tokens in (BLOCK, BLOCK - 1):
        of_blocks.allocate_slots(decoding, tokens)
        decoding.num_computed_tokens += tokens
    assert found() == BLOCK
    decoding.append_output_token_ids(2 * BLOCK - 1)
    decoding.spec_token_ids = [-1] * 2
    of_blocks.allocate_slots(decoding, 1 + 2)
    assert found() == (BLOCK if stages == 2 else 2 * BLOCK)
    of_blocks.cache_blocks(decoding, 2 * BLOCK)
    assert found() == 2 * BLOCK

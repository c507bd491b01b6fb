"""A draft on the last stage of a pipeline is made whole, whatever the target's stages hold."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm import envs
from vllm.distributed import parallel_state
from vllm.distributed.utils import get_pp_indices

from dyntree_plugin.engine.pipeline.whole_draft import as_one_stage


def layers_of(count: int) -> tuple[int, int]:
    group = parallel_state.get_pp_group()
    return get_pp_indices(count, group.rank_in_group, group.world_size)


@pytest.fixture
def second_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    group = SimpleNamespace(rank_in_group=1, world_size=2, is_first_rank=False, is_last_rank=True)
    monkeypatch.setattr(parallel_state, "_PP", group)
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "4,2")


@pytest.mark.usefixtures("second_of_two")
def test_a_draft_has_all_of_its_layers_and_the_target_its_share() -> None:
    with as_one_stage():
        assert layers_of(5) == (0, 5)
        assert parallel_state.get_pp_group().is_first_rank
    assert layers_of(6) == (4, 6)


@pytest.mark.usefixtures("second_of_two")
def test_the_stage_is_back_after_an_error() -> None:
    with pytest.raises(KeyError), as_one_stage():
        raise KeyError
    assert envs.VLLM_PP_LAYER_PARTITION == "4,2"
    assert layers_of(6) == (4, 6)

"""The option ``drafts``: each further draft must meet the conditions of the first."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from configurations import WIDTH, Build, not_built, with_all

from dyntree_plugin.admission import check
from dyntree_plugin.engine.configuration import further_drafts

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MakeFolder = Callable[..., str]


def test_every_draft_has_a_configuration_that_travels_to_the_workers(
    build: Build, model_folder: MakeFolder
) -> None:
    others = [model_folder(name, num_hidden_layers=n) for n, name in ((1, "one"), (2, "two"))]
    config = build(dyntree={"drafts": others})
    received: Any = pickle.loads(pickle.dumps(config.speculative_config))
    found = further_drafts(received)
    assert [each.draft_model_config.model for each in found] == others
    assert [each.draft_model_config.hf_config.num_hidden_layers for each in found] == [1, 2]
    assert {each.num_speculative_tokens for each in found} == {WIDTH}
    assert further_drafts(build().speculative_config) == ()


def test_further_drafts_need_a_first_one(build: Build, model_folder: MakeFolder) -> None:
    look_up = {"method": "ngram", "model": None, "prompt_lookup_max": 3}
    build(speculative=look_up)
    with pytest.raises(ValueError, match=r"dyntree\.drafts=.*method='ngram' has none"):
        build(speculative=look_up, dyntree={"drafts": [model_folder("other")]})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"vocab_size": 64}, "vocab_size (target, draft)=(128, 64)"),
        ({"max_position_embeddings": 128}, "max_model_len (target, draft)=(256, 128)"),
        ({"attention_chunk_size": 32}, "attention_chunk_size=32"),
    ],
)
def test_what_a_first_draft_may_not_be_no_further_one_may(
    build: Build, model_folder: MakeFolder, changes: dict[str, Any], named: str
) -> None:
    good, bad = model_folder("good"), model_folder("bad", **changes)
    said = not_built(build, dyntree={"drafts": [good, bad]})
    assert f"dyntree.drafts, {bad!r}: " in said
    assert named in said
    assert good not in said


def test_a_further_draft_with_experts_is_refused_on_ranks_that_share_them(
    admitted: VllmConfig,
) -> None:
    ranks = {"data_parallel_size": 2, "is_moe_model": True}
    experts = {"target_parallel_config." + name: value for name, value in ranks.items()} | {
        "draft_model_config.model_arch_config.num_experts": 8
    }
    further = with_all(admitted, {f"speculative_config.{n}": v for n, v in experts.items()})
    with pytest.raises(check.Refused, match=r"dyntree\.drafts, .*draft's experts, .*=\(True, 2\)"):
        check.refuse_further_draft(admitted, further.speculative_config, "cuda")


def test_a_target_of_experts_is_known_by_its_file(build: Build, model_folder: MakeFolder) -> None:
    experts = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    model = model_folder("experts", num_local_experts=4, sliding_window=None, **experts)
    with pytest.raises(ValueError, match="of a mixture of experts=2 is not supported"):
        build(model=model, data_parallel_size=2)
    build(model=model)

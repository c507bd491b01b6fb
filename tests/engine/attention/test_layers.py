"""Models with layers for which trees have no attention are refused before their weights load."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from vllm.config import LoadConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import (
    destroy_distributed_environment,
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.rswa_attention import RSWAAttention
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.triton_attn_diffkv import TritonAttentionDiffKVBackend
from vllm.v1.worker.gpu_worker import Worker

from dyntree_plugin.admission.check import Refused
from dyntree_plugin.engine import worker
from dyntree_plugin.engine.checked_layers import checked, refusals
from dyntree_plugin.engine.cpu.kinds import KINDS
from dyntree_plugin.engine.cpu.worker import TreeCPUWorker
from dyntree_plugin.engine.cuda.kinds import KINDS as CUDA_KINDS
from dyntree_plugin.engine.cuda.worker import TreeGPUWorker

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="layers are made on a CPU")

Make = Callable[..., VllmConfig]

MIMO = {
    "architectures": ["MiMoV2FlashForCausalLM"],
    "model_type": "mimo_v2_flash",
    "head_dim": 32,
    "v_head_dim": 16,
    "hybrid_layer_pattern": [0, 0],
    "moe_layer_freq": [0, 0],
    "attention_bias": False,
    "hidden_act": "silu",
    "layernorm_epsilon": 1e-5,
}
INKLING = {
    "architectures": ["InklingForCausalLM"],
    "model_type": "inkling_model",
    "dense_mlp_idx": 2,
    "d_rel": 8,
    "sliding_window_size": 16,
    "local_layer_ids": [0],
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make this process the only rank of an engine."""
    met: Path = tmp_path_factory.mktemp("ranks") / "met"
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{met}", 0, "gloo")
        initialize_model_parallel(1, 1)
    yield
    destroy_model_parallel()
    destroy_distributed_environment()


@pytest.fixture
def make(alone: None, model_folder: Callable[..., str]) -> Make:
    """Return a function that makes the configuration of an engine with one tiny model."""

    def made(**changes: Any) -> VllmConfig:
        model = ModelConfig(model_folder(**changes), skip_tokenizer_init=True, dtype="bfloat16")
        return VllmConfig(model_config=model, load_config=LoadConfig(load_format="dummy"))

    return made


@pytest.fixture
def weights() -> Iterator[mock.Mock]:
    """Replace the loading of weights."""
    with mock.patch.object(DummyModelLoader, "load_weights") as loading:
        yield loading


def load(config: VllmConfig, kinds: Any = KINDS) -> None:
    """Load a model with the attention of trees."""
    with set_current_vllm_config(config), kinds[0].making(), checked(config, kinds):
        get_model(vllm_config=config)


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (MIMO, ["backend TritonAttentionDiffKVBackend", "head_size (K, V)=(32, 16)"]),
        (INKLING, ["class InklingAttention", "class InklingConvState"]),
    ],
    ids=["MiMo-V2", "Inkling"],
)
def test_a_model_that_trees_have_no_layer_for_is_refused_before_its_weights_load(
    make: Make, weights: mock.Mock, model: dict[str, Any], named: list[str]
) -> None:
    with pytest.raises(Refused) as refused:
        load(make(**model))
    assert not weights.called
    for feature in named:
        assert f": {feature} is not supported" in str(refused.value)


def test_keys_and_values_of_different_sizes_pass_on_cuda(
    make: Make, weights: mock.Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their sizes reach vLLM's layers, which read that of values from their own backend."""
    monkeypatch.setattr(TritonAttentionDiffKVBackend, "head_size_v", 128)
    load(make(**MIMO), CUDA_KINDS)
    assert weights.called
    assert TritonAttentionDiffKVBackend.head_size_v == MIMO["v_head_dim"]
    quantised = make(**MIMO)
    quantised.cache_config.cache_dtype = "fp8"
    with pytest.raises(Refused, match="kv_cache_dtype='fp8' of keys and values of different sizes"):
        load(quantised, CUDA_KINDS)


BEYOND: list[tuple[dict[str, Any], str]] = [
    ({"head_size_v": 16}, "head_size (K, V)=(32, 16)"),
    ({"per_layer_sliding_window": 9}, "sliding_window=9"),
    ({"alibi_slopes": [0.5, 0.25]}, "ALiBi"),
    ({"attn_backend": CPUAttentionBackend}, "backend CPUAttentionBackend"),
    ({"type": RSWAAttention, "rswa_window": 16}, "class RSWAAttention"),
]


def found(config: VllmConfig, *layers: dict[str, Any]) -> list[str]:
    """Return the reasons to refuse a model with such layers after a plain one."""
    with set_current_vllm_config(config), KINDS[0].making():
        for number, each in enumerate(({}, *layers)):
            arguments = {"type": Attention, "num_kv_heads": 1, **each}
            arguments.pop("type")(2, 32, 1.0, prefix=f"layers.{number}", **arguments)
    made = config.compilation_config.static_forward_context
    return list(refusals(made, KINDS, rows=9))


def test_what_a_layer_has_beyond_tree_attention_is_named(make: Make) -> None:
    for arguments, named in BEYOND:
        (reason,) = found(make(), arguments)
        assert reason.startswith(f"layer layers.1: {named} is not supported")


def test_features_that_the_kernel_serves_are_admitted(make: Make) -> None:
    served: dict[str, Any] = {"logits_soft_cap": 30.0, "sinks": torch.zeros(2)}
    served["kv_sharing_target_layer_name"] = "layers.0"
    assert found(make(), served, {"per_layer_sliding_window": 10}) == []
    (reason,) = found(make(), served, {"per_layer_sliding_window": 9})
    assert reason == (
        "layer layers.2: sliding_window=9 is not supported: a tree of dyntree.node_budget=8 and "
        "its root must be smaller than the window; lower dyntree.node_budget to at most 7"
    )


def test_all_heads_have_the_scale_that_vllms_kernel_takes(make: Make) -> None:
    config = make()
    config.cache_config.cache_dtype = "fp8"
    assert found(config, {"cache_config": config.cache_config}) == []
    layer: Any = config.compilation_config.static_forward_context["layers.1"]
    for scales in ((3.0, 2.0), (5.0, 2.0)):  # of the first weights, and of others
        layer._k_scale_float, layer._v_scale_float = scales
        features = layer.impl.features(layer)
        assert (features.key_scale, features.value_scale) == scales


@pytest.mark.parametrize("dtype", ["fp8_e5m2", "fp8"])
def test_a_quantised_cache_that_trees_do_not_read_is_named(make: Make, dtype: str) -> None:
    config = make()
    config.cache_config.cache_dtype = dtype
    arguments = {"cache_config": config.cache_config}
    reason = "".join(found(config, arguments))
    assert (f"kv_cache_dtype={dtype!r} is not supported" in reason) == (dtype == "fp8_e5m2")
    assert bool(reason) == (dtype == "fp8_e5m2")


@pytest.mark.parametrize("tree_worker", [TreeCPUWorker, TreeGPUWorker])
def test_a_worker_refuses_layers_however_vllm_made_them(
    make: Make, monkeypatch: pytest.MonkeyPatch, tree_worker: Any
) -> None:
    config = make()

    def load_model(self: Any) -> None:
        layer = Attention(2, 32, 1.0, num_kv_heads=1, prefix="layers.0", alibi_slopes=[1.0, 0.5])
        assert config.compilation_config.static_forward_context == {"layers.0": layer}

    compared: list[VllmConfig] = []
    monkeypatch.setattr(worker, "check_ranks", compared.append)
    made = object.__new__(tree_worker)
    made.vllm_config = config
    with (
        mock.patch.object(Worker, "load_model", load_model),
        set_current_vllm_config(config),
        pytest.raises(Refused, match=r"layer layers\.0: ALiBi is not supported"),
    ):
        made.load_model()
    assert compared == [config]

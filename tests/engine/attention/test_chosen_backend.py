"""On CUDA the log says which attention backend trees run on, if vLLM would choose another one."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from vllm.config import AttentionConfig, get_current_vllm_config
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.gpu_worker import Worker

from dyntree_plugin import plugin
from dyntree_plugin.admission.cuda_backends import CUDA_BACKENDS, SPARSE_CUDA_BACKENDS
from dyntree_plugin.engine import worker
from dyntree_plugin.engine.attention import choice
from dyntree_plugin.engine.cuda.worker import TreeGPUWorker

Load = Callable[..., list[tuple[str, ...]]]


class AnyBackend:
    """An attention backend that serves every configuration of its kind, and asks for it as
    FLASHINFER_MLA."""

    def __init__(self, backend: AttentionBackendEnum) -> None:
        self.sparse = "SPARSE" in backend.name

    def validate_configuration(self, *, use_sparse: bool, **_: Any) -> list[str]:
        get_current_vllm_config()
        return [] if use_sparse == self.sparse else ["sparse or not"]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Return a function that loads a model on a GPU of some capability.

    It returns the names of the backends in each line of the log.
    """
    monkeypatch.setitem(sys.modules, "vllm._C_stable_libtorch", ModuleType("kernels"))
    from vllm.platforms import cuda

    monkeypatch.setattr(cuda, "_get_attn_backend_class", AnyBackend)
    monkeypatch.setattr(choice, "current_platform", cuda.CudaPlatformBase)
    monkeypatch.setattr(worker, "check_ranks", lambda config: None)

    def loaded(
        major: int, named: str | None = None, latent: bool = True, selected: int | None = None
    ) -> Any:
        lines = mock.Mock()
        monkeypatch.setattr(choice, "log_in_place_of", lines)
        capability = classmethod(lambda cls: DeviceCapability(major, 0))
        monkeypatch.setattr(cuda.CudaPlatformBase, "get_device_capability", capability)
        config: Any = SimpleNamespace(
            speculative_config=SimpleNamespace(),
            attention_config=AttentionConfig(backend=named and AttentionBackendEnum[named]),
            model_config=SimpleNamespace(
                dtype=torch.bfloat16,
                get_head_size=lambda: 128,
                use_mla=latent,
                is_mm_prefix_lm=False,
                hf_config=SimpleNamespace(),
                hf_text_config=SimpleNamespace(index_topk=selected),
            ),
            cache_config=SimpleNamespace(
                cache_dtype="auto", block_size=16, user_specified_block_size=False
            ),
            compilation_config=SimpleNamespace(static_forward_context={}),
        )
        plugin._choose_attention(config)
        # The worker has another process.
        for name in ("attention_config", "speculative_config"):
            setattr(config, name, pickle.loads(pickle.dumps(getattr(config, name))))
        made: Any = object.__new__(TreeGPUWorker)
        made.vllm_config = config
        with mock.patch.object(Worker, "load_model"):
            made.load_model()
        return [call.args for call in lines.call_args_list]

    return loaded


def test_another_backend_than_vllms_is_logged_with_both_names_unless_the_user_named_it(
    load: Load,
) -> None:
    assert load(10) == [("TRITON_MLA", "FLASHINFER_MLA")]
    assert load(9) == [("TRITON_MLA", "FLASH_ATTN_MLA")]
    assert load(12) == load(10, named="FLASH_ATTN_MLA") == []
    assert load(10, latent=False) == load(10, selected=2048) == load(9, selected=2048) == []


@pytest.mark.parametrize("major", [8, 9, 10, 12])
def test_what_vllm_prefers_carries_trees(major: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's backend takes all that trees serve, so vLLM chooses none that comes after it."""
    monkeypatch.setitem(sys.modules, "vllm._C_stable_libtorch", ModuleType("kernels"))
    from vllm.platforms import cuda

    preferred = cuda._get_backend_priorities(False, DeviceCapability(major, 0))
    names = [backend.name for backend in preferred]
    assert {*names[: names.index("TRITON_ATTN") + 1]} == {*CUDA_BACKENDS}


@pytest.mark.parametrize(
    ("major", "cache", "carried"),
    [
        *((major, cache, True) for major in (9, 10) for cache in ("auto", "fp8")),
        (10, "fp8_e4m3", True),
        (9, "fp8_e4m3", False),  # refused
    ],
)
def test_with_an_indexer_what_vllm_prefers_carries_trees(
    major: int, cache: Any, carried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm._C_stable_libtorch", ModuleType("kernels"))
    for name in ("vllm.vllm_flash_attn", "vllm.vllm_flash_attn.flash_attn_interface"):
        library: Any = ModuleType(name)
        library.flash_attn_varlen_func = library.get_scheduler_metadata = None
        monkeypatch.setitem(sys.modules, name, library)
    from vllm.platforms import cuda

    capability = DeviceCapability(major, 0)
    preferred = cuda._get_backend_priorities(True, capability, num_heads=128, kv_cache_dtype=cache)
    sparse = {each.name: each.get_class() for each in preferred if "SPARSE" in each.name}
    fitting = [
        name
        for name, kind in sparse.items()
        if kind.supports_compute_capability(capability) and kind.supports_kv_cache_dtype(cache)
    ]
    assert (fitting[0] in SPARSE_CUDA_BACKENDS) == carried

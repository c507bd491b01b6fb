"""The targets of the tests for GPUs run where FlashInfer is missing, as in a trimmed vLLM."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import launches
import pytest
import random_targets
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn


def test_prompts_of_gated_delta_net_need_no_flashinfer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Control: on Hopper vLLM takes its kernel, whether it is there or not."""
    hopper = SimpleNamespace(
        is_rocm=lambda: False,
        is_xpu=lambda: False,
        is_cuda=lambda: True,
        is_device_capability=lambda capability: capability == 90,
    )
    monkeypatch.setattr(qwen_gdn_linear_attn, "current_platform", hopper)
    monkeypatch.setattr(random_targets, "random_target", lambda *_, **__: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def kernel(asked: str | None) -> str:
        config: Any = SimpleNamespace(
            additional_config={} if asked is None else {"gdn_prefill_backend": asked},
            model_config=SimpleNamespace(hf_text_config=None),
        )
        return qwen_gdn_linear_attn._resolve_gdn_prefill_backend(config)[1]

    assert kernel(EngineArgs.gdn_prefill_backend) == "flashinfer"
    assert kernel(launches.of_hybrid()["gdn_prefill_backend"]) == "triton"

"""Weights with which rows of a batch share a scale: refused where vLLM quantises inputs so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from configurations import admit, changed, refusal_of, with_all
from vllm.config.quantization import resolve_quantization_config
from vllm.model_executor.layers.quantization import fp8
from vllm.model_executor.layers.quantization.online import fp8 as online
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8DynamicTensorSym

from dyntree_plugin.admission import versions

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SHARED = "by one scale of all rows of a batch"
DYNAMIC: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
STATIC = DYNAMIC | {"activation_scheme": "static"}
BLOCKS = DYNAMIC | {"weight_block_size": [128, 128]}
WRITTEN = "model_config.model_arch_config.quantization_config"
ONLINE = {
    "fp8_per_tensor": online.Fp8PerTensorOnlineMoEMethod,
    "fp8_per_block": online.Fp8PerBlockOnlineMoEMethod,
    "fp8_per_channel": online.Fp8PtpcOnlineMoEMethod,
}


def _of(
    config: VllmConfig, written: Any, quantization: str = "fp8", moe: bool = True
) -> VllmConfig:
    of_model = {"model_config.is_moe": moe, "model_config.quantization": quantization}
    return with_all(config, of_model | {WRITTEN: written})


class _ChosenError(Exception):
    pass


def _shares(monkeypatch: pytest.MonkeyPatch, module: Any, make: Any) -> bool:
    """Return whether vLLM chooses a kernel of experts for one scale of the batch."""

    def choose(activation_key: Any, **_: Any) -> None:
        raise _ChosenError(activation_key == kFp8DynamicTensorSym)

    monkeypatch.setattr(module, "select_fp8_moe_backend", choose)
    with pytest.raises(_ChosenError) as chosen:
        make()
    return bool(chosen.value.args[0])


@pytest.mark.parametrize("written", [DYNAMIC, STATIC, BLOCKS])
def test_experts_of_checkpoints(
    admitted: VllmConfig, monkeypatch: pytest.MonkeyPatch, written: dict[str, Any]
) -> None:
    config = fp8.Fp8Config.from_config(written)
    sizes = SimpleNamespace(intermediate_size_per_partition=128, tp_size=1, moe_backend="auto")
    layer: Any = SimpleNamespace(moe_config=sizes)
    admit(_of(admitted, written, moe=False))
    if not _shares(monkeypatch, fp8, lambda: fp8.Fp8MoEMethod(config, layer)):
        admit(_of(admitted, written))
        return
    reason = refusal_of(_of(admitted, written))
    assert "quantization of experts='fp8' is not supported" in reason
    assert SHARED in reason
    admit(changed(_of(admitted, written), "kernel_config.moe_backend", "marlin"))


@pytest.mark.parametrize("name", ONLINE)
def test_experts_that_are_quantised_while_they_load(
    admitted: VllmConfig, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    found = _of(admitted, None, "online")
    for given in ({"linear": name, "moe": name}, {"targets": {"*": name}}):
        args = resolve_quantization_config("online", given)
        each = changed(found, "model_config.quantization_config", args)
        if _shares(monkeypatch, online, lambda: ONLINE[name](moe=SimpleNamespace())):
            assert f"experts={name!r}" in refusal_of(each)
        else:
            admit(each)


def test_a_variable_gives_rows_their_own_scales_in_newer_versions(
    admitted: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    refusal_of(_of(admitted, DYNAMIC))
    monkeypatch.setattr(versions, "installed_vllm", lambda: ("vllm", "0.33.0"))
    admit(_of(admitted, DYNAMIC))
    monkeypatch.delenv("VLLM_BATCH_INVARIANT")
    refusal_of(_of(admitted, DYNAMIC))


@pytest.mark.parametrize("scheme", ["per_tensor", "per_channel"])
def test_scales_of_layers_by_other_tools(admitted: VllmConfig, scheme: str) -> None:
    inputs = {"dtype": "fp8_e4m3", "is_dynamic": True, "qscheme": scheme}
    granularity = {"per_tensor": "PerTensor", "per_channel": "PerRow"}[scheme]
    data = {"granularity": [{"_type": granularity, "_version": 1, "_data": {}}] * 2}
    of_torchao = {"_type": "Float8DynamicActivationFloat8WeightConfig", "_data": data}
    for name, written in (
        ("quark", {"global_quant_config": {"input_tensors": inputs}}),
        ("quark", {"layer_quant_config": {"*": {"input_tensors": [inputs]}}}),
        ("torchao", {"quant_type": {"default": of_torchao}}),
    ):
        config = _of(admitted, written, name, moe=False)
        if scheme == "per_tensor":
            assert f"quantization of layers={name!r}" in (reason := refusal_of(config))
            assert SHARED in reason
        else:
            admit(config)

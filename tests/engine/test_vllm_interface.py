"""Our methods that vLLM calls accept what the installed version of vLLM passes."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Iterator
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

import pytest
from absent_flashinfer import vllms_backend
from flash_in_torch import Library
from vllm.platforms import current_platform

if current_platform.is_cpu():
    vllms_backend()

FLASHINFER = ["attention.cuda_flashinfer.TreeFlashInferBackend"]
RECURRENT = ("MambaMixer2", "ShortConv", "GatedDeltaNet")
CUDA = [
    "cuda.runner.TreeGPUModelRunner",
    "cuda.runner.EarlierGPUStage",
    "cuda.worker.TreeGPUWorker",
    "cuda.worker.ChainGPUWorker",
    "attention.cuda.TreeFlashAttentionBackend",
    "attention.cuda.TreeTritonAttentionBackend",
    "attention.latent_cuda.TreeTritonMLABackend",
    "attention.latent_cuda.TreeFlashMLABackend",
    "attention.latent_flash_attn.TreeFlashAttnMLABackend",
    *[f"states.cuda_layers.Tree{layer}" for layer in (*RECURRENT, "KimiDelta")],
]
CPU = [
    "cpu.runner.TreeCPUModelRunner",
    "cpu.runner.EarlierCPUStage",
    "cpu.worker.TreeCPUWorker",
    "cpu.worker.PlainCPUWorker",
    "attention.cpu.TreeCPUAttentionBackend",
    "attention.latent_cpu.TreeCPUMLABackend",
    *[f"states.layers.Tree{layer}" for layer in RECURRENT],
]
SHARED = [
    "drafts.block.BlockSpeculator",
    "drafts.draft_model.TreeSpeculator",
    "drafts.look_up.LookUpSpeculator",
    "drafts.head.ContextSpeculator",
    "scheduler.TreeScheduler",
    "scheduler.AsyncTreeScheduler",
    "telemetry.step_record.CountedOutput",
    "telemetry.prometheus.TreeSpecDecodingProm",
    "attention.metadata.MaskedGroup",
]
CLASSES = SHARED + FLASHINFER + (CPU if current_platform.is_cpu() else CUDA)

REST = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
PASSED_AS = {
    Parameter.POSITIONAL_ONLY: REST[:1],
    Parameter.POSITIONAL_OR_KEYWORD: REST,
    Parameter.KEYWORD_ONLY: REST[1:],
    Parameter.VAR_POSITIONAL: REST[:1],
    Parameter.VAR_KEYWORD: REST[1:],
}


def named(name: str) -> type:
    module, _, attribute = name.rpartition(".")
    found: type = getattr(importlib.import_module(f"dyntree_plugin.engine.{module}"), attribute)
    return found


def with_parts(cls: Any) -> list[type]:
    """Return a class, and if it is an attention backend those that it names."""
    backend = hasattr(cls, "get_impl_cls")
    return [cls, cls.get_builder_cls(), cls.get_impl_cls()] if backend else [cls]


def replaced(cls: type) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, our version and vLLM's version of every method of vLLM that our classes
    override."""
    order = cls.__mro__
    for place, owner in enumerate(order):
        if not owner.__module__.startswith("dyntree_plugin"):
            continue
        for name, own in vars(owner).items():
            behind = (vars(each).get(name) for each in order[place + 1 :])
            stock = next((each for each in behind if each is not None), None)
            of_vllm = getattr(stock, "__module__", "").startswith("vllm")
            # Our constructors pass on unknown arguments, or only we call them.
            if of_vllm and name != "__init__" and callable(_function(stock)):
                yield name, own, stock


def _function(method: Any) -> Any:
    """Return the function within a class or static method; return any other method unchanged."""
    return getattr(method, "__func__", method)


def signature(method: Any) -> Signature:
    return inspect.signature(_function(method))


def differing(own: Signature, stock: Signature) -> list[str]:
    """Return parameters of ``stock`` that ``own`` lacks, and those that it requires in addition."""
    ours, theirs = own.parameters, stock.parameters
    rest = {each.kind for each in ours.values()} & {*REST}
    missing = [
        name
        for name, each in theirs.items()
        if name not in ours and not rest.issuperset(PASSED_AS[each.kind])
    ]
    unknown = [
        name
        for name, each in ours.items()
        if name not in theirs and each.default is Parameter.empty and each.kind not in rest
    ]
    return missing + unknown


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_in_front_of_vllms_takes_what_vllm_passes(name: str) -> None:
    for each in with_parts(named(name)):
        methods = [*replaced(each)]
        assert methods
        found = {n: differing(signature(own), signature(stock)) for n, own, stock in methods}
        assert [(method, names) for method, names in found.items() if names] == []
        assert not getattr(each, "__abstractmethods__", frozenset())


def test_verification_takes_the_rejection_samplers_arguments() -> None:
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

    from dyntree_plugin.engine.step.verify import TreeVerifier

    own, stock = TreeVerifier.__call__, RejectionSampler.__call__
    assert differing(signature(own), signature(stock)) == []


def test_the_targets_metadata_take_the_arguments_of_vllms() -> None:
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    from dyntree_plugin.engine.attention.metadata import WithTreeMask

    own, stock = WithTreeMask.__call__, DefaultModelState.prepare_attn
    assert differing(signature(own), signature(stock)) == []
    # The runner passes the groups by place.
    places = [[*signature(each).parameters].index("attn_groups") for each in (own, stock)]
    assert places[0] == places[1]


def test_vllms_flash_attention_takes_what_its_replacement_takes() -> None:
    """On a CPU its package cannot be imported, but the module can."""
    package = Path(str(importlib.util.find_spec("vllm").origin)).parent  # type: ignore[union-attr]
    file = package / "vllm_flash_attn" / "flash_attn_interface.py"
    spec: Any = importlib.util.spec_from_file_location("flash_attn_interface", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("get_scheduler_metadata", "flash_attn_varlen_func"):
        own = signature(getattr(Library, name)).parameters.keys() - {"self"}
        assert own <= signature(getattr(module, name)).parameters.keys()


def test_what_is_replaced_at_start_up_takes_what_it_took() -> None:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.spec_decode.metrics import SpecDecodingLogging

    from dyntree_plugin import plugin

    plugin.register()
    places: list[tuple[type, str]] = [
        (EngineArgs, "add_cli_args"),
        (type(current_platform), "check_and_update_config"),
        (VllmConfig, "_validate_v2_model_runner"),
        (SamplingParams, "_validate_spec_decode"),
        (InputProcessor, "process_inputs"),
        (SpecDecodingLogging, "observe"),
        (OutputProcessor, "_update_stats_from_finished"),
        (OutputProcessor, "update_scheduler_stats"),
    ]
    for owner, name in places:
        own = _function(inspect.getattr_static(owner, name))
        stock = signature(own.__wrapped__)
        assert differing(inspect.signature(own, follow_wrapped=False), stock) == [], name


def test_a_parameter_that_is_not_taken_or_not_given_is_found() -> None:
    def stock(self: Any, tokens: int, *, step: int = 0) -> None: ...

    def same(self: Any, tokens: int, *, step: int = 0, more: int = 0) -> None: ...

    def handing_on(*args: Any, **kwargs: Any) -> None: ...

    def older(self: Any, tokens: int) -> None: ...

    def other(self: Any, tokens: int, place: int, step: int = 0) -> None: ...

    def against_stock(own: Any) -> list[str]:
        return differing(signature(own), signature(stock))

    assert against_stock(same) == against_stock(handing_on) == []
    assert against_stock(older) == ["step"]
    assert against_stock(other) == ["place"]

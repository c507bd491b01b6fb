"""Options with which a kind of targets was not compared with decoding without trees."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from dyntree_kernels.features import KV_CACHE_DTYPES
from dyntree_plugin.admission.refusals import Refusal, dtype_of, kv_cache_dtype


class _Row(NamedTuple):
    value: Callable[[Any], Any]
    refused: Callable[[Any], Any]
    advice: str


_OPTIONS = {
    "tensor_parallel_size": _Row(
        lambda c: c.parallel_config.tensor_parallel_size, lambda ranks: ranks > 1, "set it to 1"
    ),
    "pipeline_parallel_size": _Row(
        lambda c: c.parallel_config.pipeline_parallel_size, lambda stages: stages > 1, "set it to 1"
    ),
    "dtype": _Row(
        lambda c: dtype_of(c.model_config),
        lambda dtype: dtype == "float16",
        "set --dtype to bfloat16 or float32",
    ),
    "kv_cache_dtype": _Row(
        kv_cache_dtype, lambda dtype: dtype in KV_CACHE_DTYPES, "set it to the model's type"
    ),
    "quantization": _Row(
        lambda c: c.model_config.quantization, bool, "use a checkpoint in bfloat16 or float32"
    ),
    "supports_multimodal_inputs": _Row(
        lambda c: c.model_config.supports_multimodal_inputs,
        bool,
        "for text alone use --language-model-only",
    ),
    "uses_mrope": _Row(lambda c: c.model_config.uses_mrope, bool, "use another model"),
    "enable_lora": _Row(lambda c: c.lora_config is not None, bool, "leave it out"),
    "kv_transfer_config": _Row(lambda c: c.kv_transfer_config is not None, bool, "leave it out"),
}


_WHY = "not compared yet with decoding without trees; "


class Targets(NamedTuple):
    """Targets of one kind: ``kind`` reads from a model's configuration whether it is of that kind,
    and ``name`` is what messages call that. ``of``: what ``kind`` reads of a ``VllmConfig``."""

    name: str
    kind: Callable[[Any], Any]
    of: Callable[[Any], Any] = lambda c: c.model_config

    def refusal(
        self, option: str, value: Callable[[Any], Any], refused: Callable[[Any], Any], advice: str
    ) -> Refusal:
        """Return a check of ``VllmConfig`` that other targets pass."""
        return Refusal(
            f"{self.name}, {option}",
            lambda c: (self.kind(self.of(c)), value(c)),
            lambda found: bool(found[0]) and refused(found[1]),
            advice,
        )

    def uncompared(self, *options: str) -> Iterator[Refusal]:
        """Return checks of options with which these targets were not compared."""
        for option in options:
            value, refused, advice = _OPTIONS[option]
            yield self.refusal(option, value, refused, _WHY + advice)

    def other_than(self, compared: Collection[str]) -> Refusal:
        """Return a check of the architecture: all but the ``compared`` ones are refused."""
        return self.refusal(
            "architecture",
            lambda c: c.model_config.architecture,
            lambda name: name not in compared,
            f"{_WHY}use one of {', '.join(compared)}",
        )

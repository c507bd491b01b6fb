"""vLLM's attention backends on CUDA that serve trees; others are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from dyntree_kernels.features import KV_CACHE_DTYPES
from dyntree_plugin.admission.refusals import Refusal, dtype_of, index_topk, kv_cache_dtype
from dyntree_plugin.options.methods import reads_masks

CUDA_BACKENDS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")
"""vLLM's attention backends on CUDA that serve trees; vLLM chooses among them."""

LATENT_CUDA_BACKENDS = ("TRITON_MLA", "FLASHMLA", "FLASH_ATTN_MLA")
"""Those for multi-head latent attention; they need 16-bit types. The first one runs on every GPU,
the others on Hopper. The last one reads no quantised cache."""

SPARSE_CUDA_BACKENDS = ("FLASHMLA_SPARSE", "FLASH_ATTN_MLA_SPARSE", "FLASHINFER_MLA_SPARSE")
"""Those for latent attention with an indexer; vLLM chooses among them on Hopper and Blackwell."""


def _named(attention_backend: Any) -> str | None:
    return None if attention_backend is None else str(attention_backend.name)


def _backend_of_masks(config: Any) -> str | None:
    """Return FLASHINFER if it is named for a draft that reads masks."""
    speculation = config.speculative_config
    if speculation is None or not reads_masks(speculation):
        return None
    found = _named(config.attention_config.backend), _named(speculation.attention_backend)
    return "FLASHINFER" if "FLASHINFER" in found else None


class _Kind(NamedTuple):
    """A kind of targets, by latent attention, an indexer and a quantised cache of it, and the
    backends that serve it."""

    latent: bool
    sparse: bool
    quantised: bool
    backends: tuple[str, ...]

    def refusal(self, option: str, named: Callable[[Any], str | None]) -> Refusal:
        """Return a check of an option that names the backend of such targets."""

        def value(config: Any) -> str | None:
            latent = config.model_config.use_mla
            sparse = latent and bool(index_topk(config.model_config))
            quantised = latent and not sparse and kv_cache_dtype(config) in KV_CACHE_DTYPES
            return named(config) if (latent, sparse, quantised) == self[:3] else None

        return Refusal(
            option,
            value,
            lambda name: name not in (None, *self.backends),
            f"trees{' over quantised caches' * self.quantised} run on "
            f"{' and '.join(filter(None, (', '.join(self.backends[:-1]), self.backends[-1])))}; "
            "leave it out",
        )


_KINDS = (
    _Kind(False, False, False, CUDA_BACKENDS),
    _Kind(True, False, False, LATENT_CUDA_BACKENDS),
    _Kind(True, False, True, LATENT_CUDA_BACKENDS[:2]),
    _Kind(True, True, False, SPARSE_CUDA_BACKENDS),
)


CUDA_REFUSALS = (
    *(
        kind.refusal(option, named)
        for kind in _KINDS
        for option, named in (
            ("attention_backend", lambda c: _named(c.attention_config.backend)),
            (
                "speculative_config.attention_backend",
                lambda c: c.speculative_config and _named(c.speculative_config.attention_backend),
            ),
        )
    ),
    Refusal(
        "attention_config.backend_per_kind",
        lambda c: c.attention_config.backend_per_kind,
        bool,
        "trees need one backend for all layers; leave it out",
    ),
    Refusal(
        "attention_backend with parallel_drafting",
        _backend_of_masks,
        bool,
        "beside prompts, vLLM plans its kernel for a draft's masks by lengths that the host does "
        "not know; set it to FLASH_ATTN or TRITON_ATTN",
    ),
    Refusal(
        "is_mm_prefix_lm, attention_backend",
        lambda c: (c.model_config.is_mm_prefix_lm, _named(c.attention_config.backend)),
        lambda found: found[0] and found[1] not in (None, "TRITON_ATTN"),
        "with images whose tokens see each other both ways, trees run on TRITON_ATTN; leave it out",
    ),
    Refusal(
        "use_mla, dtype",
        lambda c: (c.model_config.use_mla, dtype_of(c.model_config)),
        lambda found: found[0] and found[1] == "float32",
        "vLLM's kernels of latent attention on CUDA take 16-bit types; set --dtype to bfloat16",
    ),
)
"""Checks of ``VllmConfig`` on CUDA."""

"""vLLM's attention backends on CUDA that serve trees; others are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dyntree_plugin.admission.refusals import Refusal, dtype_of

CUDA_BACKENDS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")
"""vLLM's attention backends on CUDA that serve trees; vLLM chooses among them."""

LATENT_CUDA_BACKENDS = ("TRITON_MLA", "FLASHMLA", "FLASH_ATTN_MLA")
"""Those for multi-head latent attention; they need 16-bit types. The first one runs on every GPU,
the others on Hopper."""


def _named(attention_backend: Any) -> str | None:
    return None if attention_backend is None else str(attention_backend.name)


def _backend_refusal(option: str, named: Callable[[Any], str | None], latent: bool) -> Refusal:
    """Return a check of an option that names the backend of targets with latent attention, or of
    others."""
    backends = LATENT_CUDA_BACKENDS if latent else CUDA_BACKENDS
    return Refusal(
        option,
        lambda c: named(c) if c.model_config.use_mla == latent else None,
        lambda name: name not in (None, *backends),
        f"trees run on {', '.join(backends[:-1])} and {backends[-1]}; leave it out",
    )


CUDA_REFUSALS = (
    *(
        _backend_refusal(option, named, latent)
        for latent in (False, True)
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
        "use_mla, dtype",
        lambda c: (c.model_config.use_mla, dtype_of(c.model_config)),
        lambda found: found[0] and found[1] == "float32",
        "vLLM's kernels of latent attention on CUDA take 16-bit types; set --dtype to bfloat16",
    ),
)
"""Checks of ``VllmConfig`` on CUDA."""

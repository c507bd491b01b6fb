"""The checks of this machine, one function each."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Iterator
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Literal

from packaging.requirements import Requirement

from dyntree_plugin import openmp
from dyntree_plugin.admission import versions
from dyntree_plugin.commands.doctor.report import Check
from dyntree_plugin.options.options import NAMESPACE
from dyntree_plugin.provenance import cpu

_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
_GIB = 2**30
_BEFORE = _GIB
"""What vLLM's processes take, besides one like this, before a worker looks for memory: 0.9 GiB with
the embedded pair."""


def machine_checks() -> Iterator[Check]:
    """Run every check that does not depend on a command line."""
    yield Check("Python", "ok", f"{platform.python_version()} on {platform.machine()}")
    yield vllm()
    yield plugin()
    if versions.installed_vllm() is None:
        return
    kind = device_type()
    yield device()
    yield runner()
    yield from packages(kind)
    if kind == "cpu":
        yield native_kernels()
        yield openmp_library()


def vllm() -> Check:
    name, version = versions.installed_vllm() or ("vllm", "not installed")
    installed = f"{name} {version}"
    if versions.version_refusal() is None:
        return Check("vLLM", "ok", installed)
    return Check("vLLM", "fail", installed, versions.ADVICE)


def plugin() -> Check:
    """Check that vLLM finds the plugin and may load it."""
    group = "vllm.general_plugins"
    if NAMESPACE not in {entry.name for entry in metadata.entry_points(group=group)}:
        advice = "install vllm-dyntree into this environment with pip"
        return Check("plugin", "fail", f"no entry point {NAMESPACE} in {group}", advice)
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and NAMESPACE not in allowed.split(","):
        value = f"VLLM_PLUGINS={allowed!r} leaves it out"
        return Check("plugin", "fail", value, f"unset it, or add {NAMESPACE}")
    return Check("plugin", "ok", f"entry point {NAMESPACE} in {group}")


def device() -> Check:
    from vllm.platforms import current_platform

    kind = device_type()
    if kind == "cpu":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        return Check("device", "ok", f"cpu: {cpu()}, {cores} cores to run on")
    device = f"{kind}: {current_platform.get_device_name()}" if kind else "none that vLLM knows"
    refusal = versions.platform_refusal(kind)
    if refusal is None:
        advice = (
            "docs/gpu.md says what ran on a GPU; for the rest, compare the tokens of a few greedy "
            "requests with those of the same engine without the dyntree options"
        )
        return Check("device", "warn", device, advice)
    return Check("device", "fail", device, refusal.partition(": ")[2])


def runner() -> Check:
    variable = "VLLM_USE_V2_MODEL_RUNNER"
    value = os.environ.get(variable)
    if value is not None and value.lower() in ("0", "false"):
        return Check(
            "runner", "fail", f"{variable}={value!r}", "trees need the V2 runner: unset it"
        )
    return Check("runner", "ok", "V2, which dyntree selects for engines with trees")


def packages(kind: str) -> Iterator[Check]:
    """Check the packages of the kernels. Packages for a GPU are not needed on a CPU."""
    for name, requirement, of_kind in (
        ("numba", "numba", "cpu"),
        ("Triton", "triton", "cuda"),
        ("FlashInfer", versions.FLASHINFER, "cuda"),
    ):
        try:
            yield Check(name, "ok", metadata.version(Requirement(requirement).name))
        except metadata.PackageNotFoundError:
            if kind != of_kind:
                yield Check(name, "ok", f"not installed; only {of_kind.upper()} engines need it")
            elif name in ("numba", "Triton"):
                yield Check(
                    name, "fail", "not installed", f"install vLLM again: it requires {name}"
                )
            else:
                advice = f"to use its kernel: pip install '{requirement}'"
                yield Check(name, "ok", "not installed; Triton's kernel serves", advice)


def companions() -> Check:
    """Check that torchvision, torchaudio and torchcodec load, if installed; Transformers imports
    them.

    Pip may choose CUDA builds, which do not load with a PyTorch for CPUs.
    """
    name = "companions"
    installed = [package for package in _COMPANIONS if find_spec(package) is not None]
    broken = {}
    for package in installed:
        try:
            import_module(package)
        except (ImportError, OSError, RuntimeError) as problem:
            broken[package] = str(problem).partition("\n")[0]
    if not broken:
        return Check(
            name, "ok", f"of PyTorch: {', '.join(installed) or 'none, and none is needed'}"
        )
    advice = f"pip uninstall {' '.join(broken)}; or install their builds for this PyTorch"
    problems = "; ".join(f"{each} does not load: {problem}" for each, problem in broken.items())
    return Check(name, "fail", problems, advice)


def native_kernels() -> Check:
    """Compile the CPU kernels, and compare tree attention with dense softmax."""
    name = "CPU kernels"
    start = time.perf_counter()
    try:
        from dyntree_plugin.commands.doctor.kernels import largest_error

        error = largest_error()
    except (ImportError, RuntimeError) as problem:  # numba's errors are RuntimeErrors.
        return Check(name, "fail", f"they do not run: {problem}", "reinstall numba")
    seconds = time.perf_counter() - start
    ran = f"compiled and run in {seconds:.1f} s; largest error {error:.0e}"
    if error > 1e-4:
        return Check(name, "fail", ran, "the results are wrong: report it with this CPU's name")
    return Check(name, "ok", ran)


def openmp_library() -> Check:
    """Check which OpenMP engines use."""
    path = openmp.library()
    chosen = os.environ.get("LD_PRELOAD", "")
    if path is None:
        return Check("OpenMP", "ok", "PyTorch's; Intel's is not installed")
    if openmp.loaded():
        return Check("OpenMP", "ok", "libiomp5 is loaded in this process")
    if any(other in chosen for other in ("libomp", "libgomp")):
        advice = f"small models decode faster with LD_PRELOAD={path}"
        return Check("OpenMP", "warn", f"LD_PRELOAD={chosen!r} is kept", advice)
    state = "libiomp5 is installed; dyntree's commands and vLLM's processes load it themselves"
    return Check("OpenMP", "ok", state, f"for an engine in your process: LD_PRELOAD={path}")


def memory(share: float, kv_cache_bytes: int | None = None) -> Check:
    """Check that the worker of vLLM's CPU engine will find the memory that it asks for.

    It asks for ``share`` of the memory of its node, or for a KV cache of ``kv_cache_bytes`` alone.
    """
    from vllm.utils.cpu_resource_utils import get_allowed_cpu_list, get_memory_node_info

    node = get_memory_node_info(get_allowed_cpu_list()[0].numa_node)
    total, available = node.total_memory, node.available_memory
    found = f"{available / _GIB:.1f} of {total / _GIB:.1f} GiB free"
    left = max(available - _BEFORE, 0)
    if kv_cache_bytes is None:
        wanted, asked = math.ceil(total * share), f"{share:.0%} of it"
        fits = f"--gpu-memory-utilization {math.floor(100 * left / total) / 100:.2f}"
        option = f"give {fits}, which here means the CPU's memory"
    else:
        wanted, asked = kv_cache_bytes, f"{kv_cache_bytes / _GIB:.1f} GiB for the KV cache"
        option = f"give --kv-cache-memory-bytes, or VLLM_CPU_KVCACHE_SPACE, {left / _GIB:.1f} GiB"
        option += " less the weights at most"
    if wanted <= 0:
        return Check("memory", "fail", f"a KV cache of {wanted} bytes holds nothing", option)
    if wanted <= left:
        return Check("memory", "ok", found)
    status: Literal["warn", "fail"] = "fail" if wanted > available else "warn"
    would = "would" if status == "fail" else "might"
    advice = f"vLLM asks for {asked} and {would} not start: {option}, or free memory"
    return Check("memory", status, found, advice)


def device_type() -> str:
    """Return the device type of vLLM's platform."""
    from vllm.platforms import current_platform

    return str(current_platform.device_type)

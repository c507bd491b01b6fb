"""Check which kernels this machine uses and whether they are right, and build kernels."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from dyntree_kernels import dispatch
from dyntree_plugin import signals
from dyntree_plugin.admission import versions
from dyntree_plugin.commands.doctor import attend
from dyntree_plugin.commands.doctor.report import Check

ARCHITECTURES = "FLASHINFER_CUDA_ARCH_LIST"
_ROWS = 17
_CONTEXT = 1024
_ROUNDING = 32
"""Most error of vLLM's attention in units of a type's precision; 2 to 5 were measured."""


def attention(
    heads: int = 32,
    kv_heads: int = 8,
    head_size: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    rows: int = _ROWS,
    layers: int = 32,
    block_size: int = 16,
    model: str = "",
    asked: str = "auto",
    table: Collection[dispatch.Measurement] = (),
) -> Check:
    """Check which kernel of tree attention a model's shape gets, and why.

    ``model``: its name; None for an example shape. ``asked``: the option `attention`. ``table``:
    measurements.
    """
    name = f"attention, {model}" if model else "attention"
    cuda = torch.cuda.is_available()
    problem = dispatch.Problem(
        device=torch.cuda.get_device_name() if cuda else "cpu",
        capability=torch.cuda.get_device_capability() if cuda else None,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        dtype=dtype,
        kv_dtype=dtype,
        rows=rows,
        context=_CONTEXT,
        layers=layers,
        block_size=block_size,
    )
    shape = (
        f"{heads} heads, {kv_heads} of them with KV, of size {head_size} in "
        f"{str(dtype).removeprefix('torch.')}"
    )
    available = _available(problem, asked)
    try:
        choice = dispatch.choose(problem, available.keys(), table)
    except ValueError as error:
        return Check(name, "fail", f"none for {shape}", str(error).partition("(")[2].rstrip(")"))
    example, module = "" if model else ", for example", available[choice.name]
    found = f"{choice.name}{example} for {shape}: {choice.reason}"
    if module is not None and not module.is_built():
        found += "; the first engine compiles it, or serves with another kernel if that fails"
    return Check(name, "ok", found)


def _available(problem: dispatch.Problem, asked: str) -> dict[str, Any]:
    """Return the kernels that an engine would choose from, with the modules of some."""
    if problem.capability is None:
        return dict.fromkeys(dispatch.installed())
    if asked != "auto":
        return dict.fromkeys(dispatch.installed() & {asked})
    from dyntree_plugin.engine.attention.choice import modules

    found = modules(problem, asked)
    return {name: found[name] for name in dispatch.installed() & found.keys()}


def layout(head_size: int = 128, dtype: torch.dtype = torch.bfloat16, model: str = "") -> Check:
    """Check that vLLM's attention runs on this CPU, and that trees can read the KV cache as it
    packs it."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    from dyntree_kernels.cpu.layout import ISAS

    name = f"KV layout, {model}" if model else "KV layout"
    isa = _get_attn_isa(dtype, 128, head_size)
    if isa not in ISAS:
        advice = f"trees need one of {', '.join(ISAS)}: use an x86 CPU"
        return Check(name, "fail", isa, advice)
    if problem := _attention_fails(isa, head_size, str(dtype).removeprefix("torch.")):
        return Check(name, "fail", isa, f"vLLM's attention does not run here: {problem}")
    return Check(name, "ok", f"{isa}; vLLM's attention runs")


@functools.cache
def _attention_fails(isa: str, head_size: int, dtype: str) -> str | None:
    """Run vLLM's attention in another process; return what goes wrong, or None."""
    command = [sys.executable, "-m", attend.__name__, isa, str(head_size), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if death := signals.explain(done.returncode):
        return death
    lines = [line for line in done.stdout.splitlines() if line.startswith(attend.RESULT)]
    if done.returncode != 0 or not lines:
        return (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    error = float(lines[-1].removeprefix(attend.RESULT))
    if error <= _ROUNDING * torch.finfo(getattr(torch, dtype)).eps:
        return None
    return f"its result is wrong by {error:.2g}; try --dtype float32, and report it"


def largest_error() -> float:
    """Return the largest error of the CPU's tree attention on a small tree, against softmax."""
    from dyntree_kernels.ancestors import ancestor_bits, unpack_bits
    from dyntree_kernels.cpu.attention import tree_attention
    from dyntree_kernels.cpu.layout import unpack
    from dyntree_kernels.features import LayerFeatures
    from dyntree_kernels.reference import masked_attention

    parents = torch.tensor([[-1, 0, 0, 1, 1, 2, 5]])
    rows, context, features = parents.shape[1], 40, LayerFeatures(scale=0.2)
    generator = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, 2, 2, 32, 32, generator=generator)
    q = torch.randn(rows, 4, 32, generator=generator)
    out, bits = torch.empty_like(q), ancestor_bits(parents)[0]
    span = torch.tensor([0, rows], dtype=torch.int32)
    table, lengths = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([context])
    tree_attention(q, key, value, "vec", table, lengths, span, bits, out, features)
    keys, values = (each[: context + rows] for each in unpack(key, value, "vec"))
    mask = torch.nn.functional.pad(unpack_bits(bits, rows), (context, 0), value=True)
    expected = masked_attention(q, keys, values, mask, features)
    return float((out.double() - expected).abs().max())


def build(
    head_sizes: set[int],
    dtype: torch.dtype,
    xqa: tuple[torch.dtype, int, int, int] | None,
    report: Callable[[str], None],
) -> Iterator[Check]:
    """Build FlashInfer's tree attention ahead of time, one module per head size, and XQA for a
    target's shape, if given.

    Without a GPU it is built for the architectures that FlashInfer's variable names.
    """
    name = "building kernels"
    if not (torch.cuda.is_available() or os.environ.get(ARCHITECTURES)):
        advice = (
            f"to build FlashInfer's kernel for another machine, set {ARCHITECTURES}, for an H200 "
            "to 9.0a; others compile on first use"
        )
        yield Check(name, "fail", "there is no CUDA device here", advice)
        return
    if find_spec("flashinfer") is None:
        advice = f"pip install '{versions.FLASHINFER}'"
        yield Check(name, "fail", "FlashInfer is not installed", advice)
        return
    from dyntree_kernels.cuda.flashinfer_variant import Module, Variant
    from dyntree_kernels.cuda.flashinfer_variant import build as build_module
    from dyntree_kernels.cuda.xqa import Xqa

    makers: list[Callable[[], Module]] = [
        partial(Variant, dtype, dtype, head_size) for head_size in sorted(head_sizes)
    ]
    for make in makers + ([partial(Xqa, *xqa)] if xqa else []):
        try:
            module = make()
            seconds = build_module(module, report)
        except (ValueError, RuntimeError) as error:  # an unsupported shape, or nvcc
            yield Check(name, "fail", str(error), "see kernels/README.md for what it needs")
            continue
        yield Check(name, "ok", f"{module.name}, {seconds:.0f} s")

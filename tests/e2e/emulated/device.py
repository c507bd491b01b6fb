"""Replace what the CUDA engine uses of torch.cuda, of Triton and of vLLM's kernel launches, on a
CPU."""

from __future__ import annotations

import importlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from quick_interpreter import quicken

from emulated.tape import RUBBISH, Tape

_SPARSE = (
    "vllm.model_executor.layers.fused_embed_norm",
    "vllm.v1.attention.ops.metadata",
    "vllm.v1.attention.backends.mla.sparse_utils",
    "vllm.v1.attention.backends.mla.indexer",
    "vllm.models.deepseek_v32.common.kernels",
)
"""What runs targets with sparse latent attention."""
PROCESSORS = 2
"""Number of processors; small, because more processors split the columns of attention further."""

replays: Counter[str] = Counter()
"""Number of graph replays, by the stage that captured the graph."""

launches: Counter[str] = Counter()
"""Number of launches of dyntree's kernels outside of graphs, by kernel."""

_arriving: list[Callable[[], None]] = []
_idle = False


class Event:
    """Replace ``torch.cuda.Event``: waiting for it completes the copies that were started before
    it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._brings: list[Callable[[], None]] = []
        self._at = 0.0

    def record(self, *_: Any) -> None:
        self._brings, self._at = _arriving[:], time.perf_counter()

    def synchronize(self) -> None:
        for arrive in self._brings:
            arrive()

    def query(self) -> bool:
        self.synchronize()
        return True

    def wait(self, *_: Any) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return (end._at - self._at) * 1e3


def synchronize(*_: Any) -> None:
    for arrive in _arriving[:]:
        arrive()


class Graph:
    """Replace ``torch.cuda.CUDAGraph``."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.tape = Tape()
        self.of = ""

    def replay(self) -> None:
        if Tape.recording is not None:
            raise RuntimeError("a graph is replayed within a capture")
        replays[self.of] += 1
        self.tape.replay()

    def reset(self) -> None:
        self.tape = Tape()


class Capture:
    """Replace ``torch.cuda.graph``."""

    def __init__(self, graph: Graph, *_: Any, **__: Any) -> None:
        self._graph = graph

    def __enter__(self) -> None:
        self._graph.of = _capturing()
        self._graph.tape.__enter__()

    def __exit__(self, *error: object) -> None:
        self._graph.tape.__exit__(*error)


def _capturing() -> str:
    """Return which stage is capturing: target, placing, verification or drafting."""
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    from dyntree_plugin.engine.cuda.captured import CapturedDrafting, CapturedVerification
    from dyntree_plugin.engine.cuda.captured_placing import CapturedPlacing
    from dyntree_plugin.engine.cuda.graph_memory import GraphMemory

    kinds = {
        CudaGraphManager: "target",
        CapturedPlacing: "placing",
        CapturedVerification: "verification",
        CapturedDrafting: "drafting",
        GraphMemory: "drafting",
    }
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        own = frame.f_locals.get("self")
        for kind, name in kinds.items():
            if isinstance(own, kind):
                return name
    raise RuntimeError("an unknown caller captures a graph")


def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Delay a non-blocking copy to the host until an event is waited for."""
    found = _STOCK_TO(tensor, *args, **kwargs)
    if not kwargs.get("non_blocking") or args[:1] != ("cpu",):
        return found
    sent, arrived = found.clone(), torch.empty_like(found)
    if arrived.numel():
        arrived.view(-1).view(torch.uint8).fill_(RUBBISH)

    def arrive() -> None:
        if arrive in _arriving:
            _arriving.remove(arrive)
            with torch.inference_mode():
                arrived.copy_(sent)

    _arriving.append(arrive)
    return arrived


_STOCK_TO = torch.Tensor.to


def emulate() -> None:
    """Replace what a CPU lacks; call it before vLLM's worker or the engine's CUDA modules are
    imported."""
    # vLLM patches torch.cuda as well, so import its patches first.
    import vllm.v1.worker.cpu.shm  # noqa: F401
    from vllm.platforms import current_platform

    _interpret_vllms(_SPARSE)

    cuda: Any = torch.cuda
    cuda.Event, cuda.CUDAGraph, cuda.graph = Event, Graph, Capture
    cuda.is_current_stream_capturing = lambda: Tape.recording is not None
    cuda._sleep = lambda cycles: None
    cuda.synchronize = torch.accelerator.synchronize = synchronize
    cuda.get_device_properties = lambda device=None: SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, multi_processor_count=PROCESSORS
    )
    torch.Tensor.to = to  # type: ignore[assignment, method-assign]
    cpu: Any = torch.cpu
    cpu._is_amx_tile_supported = lambda: False  # vLLM would choose AMX_MLA for latent attention
    platform: Any = type(current_platform)
    platform.graph_pool_handle = classmethod(lambda cls: (0, 1))
    platform.get_valid_backends = classmethod(lambda cls, capability, wanted: ([], {}))
    # Attention layers then launch within the capture instead of through an operation.
    platform.opaque_attention_op = classmethod(lambda cls: False)
    quicken()
    _take_nan()
    _record_launches()


def _interpret_vllms(modules: Iterable[str]) -> None:
    """Import modules of vLLM whose kernels the interpreter runs; vLLM for CPUs has no Triton."""
    import triton
    from triton import language
    from vllm import triton_utils

    if loaded := [name for name in modules if name in sys.modules]:
        raise RuntimeError(f"imported without Triton: {loaded}")
    with mock.patch.multiple(triton_utils, triton=triton, tl=language):
        for name in modules:
            importlib.import_module(name)


def _take_nan() -> None:
    """Let kernels find the largest of values that are all NaN, as on a GPU.

    Captures run on a cache that holds anything.
    """
    from triton.runtime import interpreter

    reduce: Any = interpreter.ReduceOps
    stock, taking = reduce.min_max, {np.nanargmax: np.argmax, np.nanargmin: np.argmin}

    def min_max(self: Any, given: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
        try:
            return stock(self, given, val_reduce_op, idx_reduce_op)
        except ValueError:
            return stock(self, given, val_reduce_op, taking[idx_reduce_op])

    reduce.min_max = min_max


def _record_launches() -> None:
    from triton.runtime.interpreter import InterpretedFunction
    from vllm.triton_utils.dispatcher import KernelOverride

    interpreted: Any = InterpretedFunction
    run = interpreted.run

    def counted(kernel: Any, *args: Any, **kwargs: Any) -> None:
        if Tape.replaying is None and kernel.fn.__module__.startswith("dyntree_kernels."):
            launches[kernel.fn.__name__] += 1
        run(kernel, *args, **kwargs)

    interpreted.run = recorded(counted)
    vllms_own: Any = KernelOverride
    vllms_own._launch = recorded(dense_vectors(vllms_own._launch))


def dense_vectors(kernel: Callable[..., None]) -> Callable[..., None]:
    """Make a replacement of a vLLM kernel refuse vectors that are not contiguous.

    The replacement would read the stride; vLLM's kernel does not.
    """

    def launch(*args: Any, **kwargs: Any) -> None:
        for each in (*args, *kwargs.values()):
            if isinstance(each, torch.Tensor) and each.dim() == 1 and not each.is_contiguous():
                raise RuntimeError(f"vLLM's kernel is given a vector of stride {each.stride(0)}")
        kernel(*args, **kwargs)

    return launch


def recorded(kernel: Callable[..., None]) -> Callable[..., None]:
    """Return a kernel that is recorded with its arguments while a capture runs."""

    def launch(*args: Any, **kwargs: Any) -> None:
        if Tape.recording is not None:
            Tape.recording.launch(kernel, args, kwargs)
        elif not _idle:
            kernel(*args, **kwargs)

    return launch


@contextmanager
def idle() -> Iterator[None]:
    """Launch no kernels. For callers that do not depend on what the kernels write."""
    global _idle
    _idle = True
    try:
        yield
    finally:
        _idle = False

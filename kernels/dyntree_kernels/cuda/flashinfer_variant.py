"""Build FlashInfer's FA2 prefill kernel with ancestor bits as its mask, ahead of time.

nvcc takes one to four minutes to compile the kernel for a dtype and head size. `build` does that
once, and the result stays in FlashInfer's cache directory.
"""

# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

import hashlib
import inspect
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

HEAD_SIZES = (64, 128, 256)

# The kernel reads `ctx_lens` and `ancestor_bits` on the device, so neither the plan nor a captured
# graph depends on them. The planned KV length need only be an upper bound.
_SOURCE = r"""
struct TreeAttention : AttentionVariantBase {
  static constexpr bool use_softmax = true;
  uint32_t window_left, qo_len, kv_len, visible, words;
  bool is_tree;
  const uint32_t* bits;
  float sm_scale_log2;

  template <typename Params>
  __device__ __host__ TreeAttention(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {
    qo_len = params.get_qo_len(batch_idx);
    kv_len = params.get_kv_len(batch_idx);
    window_left = kv_len;
    const int32_t ctx = params.ctx_lens[batch_idx];
    is_tree = ctx >= 0;
    visible = is_tree ? ctx : -1 - ctx;
    words = static_cast<uint32_t>(params.words);
    bits = reinterpret_cast<const uint32_t*>(params.ancestor_bits) +
           static_cast<uint64_t>(params.q_indptr[batch_idx]) * words;
    sm_scale_log2 = params.sm_scale * math::log2e;
  }

  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    if (kv_idx < visible) return true;
    const uint32_t column = kv_idx - visible;
    if (!is_tree) return column <= qo_idx;
    const uint32_t word = column >> 5;
    if (word >= words || qo_idx >= qo_len) return false;
    return (bits[qo_idx * words + word] >> (column & 31u)) & 1u;
  })
};
"""


@dataclass(frozen=True)
class Variant:
    """A compiled module for activations of `dtype`, a cache of `kv_dtype`, and one head size.

    Raises:
        ValueError: for a dtype or head size that is not supported.
    """

    dtype: torch.dtype
    kv_dtype: torch.dtype
    head_size: int

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"dtype={self.dtype} is not supported; allowed: float16, bfloat16")
        if self.kv_dtype not in (self.dtype, torch.float8_e4m3fn, torch.float8_e5m2):
            raise ValueError(
                f"kv_dtype={self.kv_dtype} is not supported with {self.dtype}; "
                f"allowed: {self.dtype}, float8_e4m3fn, float8_e5m2"
            )
        if self.head_size not in HEAD_SIZES:
            raise ValueError(f"head_size={self.head_size} is not supported; allowed: {HEAD_SIZES}")

    @property
    def name(self) -> str:
        """Name of the module. It has a digest of the source, so other sources have other names."""
        types = "_".join(str(x).removeprefix("torch.") for x in (self.dtype, self.kv_dtype))
        version = hashlib.sha256(_SOURCE.encode()).hexdigest()[:8]
        return f"dyntree_attention_{types}_{self.head_size}_{version}"

    def jit_args(self) -> list[Any]:
        """Return the argument `jit_args` of FlashInfer's wrapper."""
        return [
            self.name, self.dtype, self.kv_dtype, self.dtype, torch.int32, self.head_size,
            self.head_size, ["ancestor_bits", "ctx_lens"], ["int32_t", "int32_t"],
            ["words", "sm_scale"], ["int64_t", "double"], "TreeAttention", _SOURCE,
        ]  # fmt: skip

    def jit_kwargs(self) -> dict[str, str]:
        """Return the argument `jit_kwargs` of FlashInfer's wrapper.

        Keys and values of vLLM's cache have the same strides, for which FlashInfer has an option
        from version 0.7 on.
        """
        from flashinfer.jit.attention.modules import gen_customize_batch_prefill_module

        known = inspect.signature(gen_customize_batch_prefill_module).parameters
        return {"paged_kv_stride_mode": "equal"} if "paged_kv_stride_mode" in known else {}

    def spec(self) -> Any:
        """Return FlashInfer's description of the module, and write the generated sources."""
        from flashinfer.jit.attention.modules import gen_customize_batch_prefill_module

        return gen_customize_batch_prefill_module("fa2", *self.jit_args(), **self.jit_kwargs())

    def is_built(self) -> bool:
        """Return whether the module is there for this GPU's architecture: from `build`, or brought
        in FlashInfer's package (`data/aot/NAME/NAME.so`)."""
        return bool(self.spec().get_library_path().exists())


class Module(Protocol):
    """A module of FlashInfer's."""

    @property
    def name(self) -> str: ...

    def spec(self) -> Any: ...

    def is_built(self) -> bool: ...


def build(module: Module, report: Callable[[str], None]) -> float:
    """Compile a module unless it is built, and return the number of seconds that this took.

    `report` is called with a line of progress about once a second.

    Raises:
        RuntimeError: if there is no nvcc, or if the compilation fails.
    """
    spec = module.spec()
    if spec.get_library_path().exists():
        report(f"{module.name}: already built")
        return 0.0
    find_cuda_home()
    failure: list[BaseException] = []

    def compile_module() -> None:
        try:
            # Ranks of an engine begin at once.
            spec.build(verbose=False, need_lock=True)
        except BaseException as error:  # noqa: BLE001 - raised again by the caller's thread
            failure.append(error)

    start = time.monotonic()
    worker = threading.Thread(target=compile_module, daemon=True)
    worker.start()
    while worker.is_alive():
        worker.join(1.0)
        done = sum(1 for _ in spec.jit_library_path.parent.glob("*.o"))
        of, seconds = len(spec.sources), time.monotonic() - start
        report(f"{module.name}: {done} of {of} objects, {seconds:.0f} s")
    if failure:
        raise RuntimeError(f"{module.name} failed to compile: {failure[0]}") from failure[0]
    return time.monotonic() - start


def find_cuda_home() -> None:
    """Set CUDA_HOME to the toolkit of the nvcc on the PATH, unless the environment names one.

    nvcc may be a link into the toolkit. If it is a wrapper elsewhere, the toolkit must be in
    /usr/local/cuda.

    Raises:
        RuntimeError: if there is no nvcc or no toolkit.
    """
    if "CUDA_HOME" in os.environ or "CUDA_PATH" in os.environ:
        return
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise RuntimeError("FlashInfer's kernels need nvcc: add it to the PATH or set CUDA_HOME")
    home = Path(nvcc).resolve().parents[1]
    if not (home / "include" / "cuda.h").exists():
        home = Path("/usr/local/cuda")
    if not (home / "include" / "cuda.h").exists():
        raise RuntimeError(f"there is no CUDA toolkit for {nvcc}; set CUDA_HOME")
    os.environ["CUDA_HOME"] = str(home)

"""Build FlashInfer's kernels of trees ahead of time: python -m dyntree_kernels.cuda.build"""

from __future__ import annotations

import argparse
import sys

import torch

from dyntree_kernels.cuda.flashinfer_variant import HEAD_SIZES, Module, Variant, build
from dyntree_kernels.cuda.xqa import Xqa


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m dyntree_kernels.cuda.build", description=__doc__.partition(":")[0]
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--kv-dtype", help="of the cache: the same, float8_e4m3fn or float8_e5m2")
    parser.add_argument("--head-size", type=int, default=128, choices=HEAD_SIZES)
    parser.add_argument("--xqa", action="store_true", help="XQA, for capability 9 and 12")
    parser.add_argument("--group", type=int, default=4, help="XQA's query heads per KV head")
    parser.add_argument("--block-size", type=int, default=16, help="positions of XQA's blocks")
    options = parser.parse_args(arguments)
    dtype, kv_dtype = (getattr(torch, x or options.dtype) for x in ("", options.kv_dtype))
    module: Module = Variant(dtype, kv_dtype, options.head_size)
    if options.xqa:
        module = Xqa(dtype, options.head_size, options.group, options.block_size)
    end = "\r" if sys.stderr.isatty() else "\n"
    seconds = build(module, lambda line: print(line, end=end, file=sys.stderr, flush=True))  # noqa: T201
    sys.stdout.write(f"{module.name}: {seconds:.0f} s\n")


if __name__ == "__main__":
    main()

"""Build FlashInfer's tree attention ahead of time: python -m dyntree_kernels.cuda.build"""

from __future__ import annotations

import argparse
import sys

import torch

from dyntree_kernels.cuda.flashinfer_variant import HEAD_SIZES, Variant, build


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m dyntree_kernels.cuda.build", description=__doc__.partition(":")[0]
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--kv-dtype", help="of the cache: the same, float8_e4m3fn or float8_e5m2")
    parser.add_argument("--head-size", type=int, default=128, choices=HEAD_SIZES)
    options = parser.parse_args(arguments)
    kv_dtype = getattr(torch, options.kv_dtype or options.dtype)
    variant = Variant(getattr(torch, options.dtype), kv_dtype, options.head_size)
    end = "\r" if sys.stderr.isatty() else "\n"
    seconds = build(variant, lambda line: print(line, end=end, file=sys.stderr, flush=True))  # noqa: T201
    sys.stdout.write(f"{variant.name}: {seconds:.0f} s\n")


if __name__ == "__main__":
    main()

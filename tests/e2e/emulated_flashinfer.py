"""An engine of the CUDA side on vLLM's FlashInfer backend, emulated on the CPU. It runs as a
program, as engine_process.py does."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from emulated_engine import Emulated, EmulatedEngine
from engine_process import Run, answered, main, result_of

CAPABILITY = "EMULATED_CAPABILITY"


def serve_on_flashinfer(
    engine: Mapping[str, Any], runs: Mapping[str, Run], capability: tuple[int, int], layout: str
) -> dict[str, Emulated]:
    """Start an engine as on a GPU of ``capability``, with vLLM's cache in a ``layout``, and work
    through the runs.

    What vLLM's kernels ran stands among the replays.
    """
    asked = {CAPABILITY: "{}.{}".format(*capability), "VLLM_KV_CACHE_LAYOUT": layout}
    found = answered(__file__, engine, runs, threads=1, TRITON_INTERPRET="1", **asked)
    return {
        name: Emulated(result_of(one["result"]), one["replays"], one["launches"])
        for name, one in found.items()
    }


class FlashInferEngine(EmulatedEngine):
    def emulate(self, run: Run) -> Emulated:
        from emulated import flashinfer

        flashinfer.runs.clear()
        found = super().emulate(run)
        return replace(found, replays=found.replays | flashinfer.runs)


if __name__ == "__main__":
    from emulated import flashinfer, worker

    worker.configure()
    major, minor = map(int, os.environ[CAPABILITY].split("."))
    flashinfer.stand_in((major, minor))
    main(FlashInferEngine, FlashInferEngine.emulate)
    sys.stdout.flush()
    os._exit(0)

"""A pipeline of the CUDA side, emulated on the CPU. It runs as a program, as engine_process.py
does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import stages
from engine_process import Result, Run


def serve_emulated_in_stages(
    engine: Mapping[str, Any], runs: Mapping[str, Run]
) -> dict[str, Result]:
    """Start a pipeline as on CUDA, and work through the runs."""
    return stages.serve_in_stages(engine, runs, program=__file__, TRITON_INTERPRET="1")


def configure() -> None:
    from emulated import worker

    worker.configure()


if __name__ == "__mp_main__":  # a stage, before it loads the plugin
    configure()
if __name__ == "__main__":
    configure()
    stages.main(stages.StagedEngine)

"""An engine that notes which blocks of the KV cache its requests hold, step by step.

It runs as a program, as engine_process.py does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from engine_process import Engine, Result, Run, answered, main, result_of


class Blocks(NamedTuple):
    """Blocks during one run, by KV cache group and over all steps and requests.

    ``states``: the numbers of blocks that a request held in groups of recurrent layers.
    ``attention``: by how many blocks a request held more than its tokens fill, at most.
    ``lost``: blocks that were free before the run, and not after it.
    """

    states: list[int]
    attention: int
    lost: int


def serve_noting(
    engine: Mapping[str, Any], runs: Mapping[str, Run]
) -> dict[str, tuple[Result, Blocks]]:
    """Work through the runs as `engine_process.serve` does with one thread."""
    found = answered(__file__, engine, runs, threads=1)
    return {name: (result_of(result), Blocks(*blocks)) for name, (result, blocks) in found.items()}


def noted(engine: Engine, run: Run) -> tuple[Result, Blocks]:
    from vllm.v1.kv_cache_interface import MambaSpec

    llm: Any = engine.llm.llm_engine
    scheduler = llm.engine_core.engine_core.scheduler
    manager = scheduler.kv_cache_manager
    groups = [group.kv_cache_spec for group in manager.kv_cache_config.kv_cache_groups]
    before, stock = manager.block_pool.get_num_free_blocks(), llm.step
    states, attention = set(), [0]

    def step() -> Any:
        found = stock()
        for request in scheduler.running:
            held = manager.get_block_ids(request.request_id)
            for spec, blocks in zip(groups, held, strict=True):
                if isinstance(spec, MambaSpec):
                    states.add(len(blocks))
                else:
                    full = -(-request.num_tokens // spec.block_size)
                    attention.append(len(blocks) - full)
        return found

    llm.step = step
    try:
        result = engine.work(run)
    finally:
        del llm.step
    lost = before - manager.block_pool.get_num_free_blocks()
    return result, Blocks(sorted(states), max(attention), lost)


if __name__ == "__main__":
    main(work=noted)

"""An engine whose context vLLM fits to the memory, and prompts that end shortly before its end.

It runs as a program, as engine_process.py does.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from engine_process import Engine, Run, answered

LEFT = range(1, 24)
"""Tokens between the ends of the prompts and that of the context."""


def answers(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``context``, the ``tokens`` of every prompt's answer, how many nodes the target
    ``accepted``, and how many ``positions`` beyond the block tables got a slot computed."""
    few = {"max_num_seqs": 4, "max_num_batched_tokens": 512}
    return answered(__file__, {**few, **arguments}, {}, threads=1)


@contextmanager
def noted() -> Iterator[list[int]]:
    """Note how many positions of each batch lie beyond the block tables."""
    from vllm.v1.worker.gpu.block_table import BlockTables

    stock, found = BlockTables.compute_slot_mappings, list[int]()

    def compute(self: Any, index: Any, starts: Any, positions: Any, *rest: Any, **out: Any) -> Any:
        room = self.block_sizes[0] * self.block_tables[0].gpu.shape[1]
        found.append(int((positions[: starts[-1]] >= room).sum()))
        return stock(self, index, starts, positions, *rest, **out)

    with mock.patch.object(BlockTables, "compute_slot_mappings", compute):
        yield found


def main(job_path: str, results_path: str) -> None:
    from workload import KINDS, long

    kinds, engine = list(KINDS), Engine(json.loads(Path(job_path).read_text())["engine"])
    context = engine.llm.llm_engine.model_config.max_model_len
    asked = [
        long(left, kinds[left % len(kinds)], context - left, max_tokens=None, ignore_eos=True)
        for left in LEFT
    ]
    with noted() as beyond:
        result = engine.work(Run(asked))
    found = {
        "context": context,
        "tokens": [output and output.tokens[0] for output in result.outputs],
        "accepted": result.metrics.get("vllm:spec_decode_num_accepted_tokens_total", 0),
        "positions": sum(beyond),
    }
    Path(results_path).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

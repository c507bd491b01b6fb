"""Compare the bits of answers with trees and without nodes on this machine's device, with
`exactness` bits. It is the comparison of device_identity.py, without any margin.

As a program, it writes the report: ``python device_bits.py FILE``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import device_identity
import sabotage_of_bits
import sabotage_of_bits_on_cuda
import workload
from device_identity import Device
from engine_process import START_AND_WORK_SECONDS, Result, Run
from equal_bits import differing, without_nodes
from identity_report import Broken, Record, Row, report
from margins import Verdict

DTYPE = "bfloat16"
PLAIN = "plain"
RUNS = {
    name: Run([replace(r, params=r.params | {"logprobs": 20}) for r in run.requests], run.batch)
    for name, run in device_identity.RUNS.items()
    if name != "everything served"
}
_ON_DEVICE = sabotage_of_bits_on_cuda if device_identity.ON_CUDA else sabotage_of_bits
CONTROLS = {
    each.__name__: Run(RUNS["batch 16"].requests[:32], sabotage=each.__name__)
    for each in _ON_DEVICE.BROKEN
}
_BITS: Any = {"exactness": "bits"}
ENGINES: Mapping[str, dict[str, Any]] = {
    "tree of 16": workload.tree(16, **_BITS),
    "tree of 64": workload.with_options(64, node_budget=64, max_depth=8, width=8, **_BITS),
}
"""Each is compared with itself, asked for no nodes in batches of 3."""


def runs_of(engine: str) -> dict[str, Run]:
    requests = {r.key: r for run in RUNS.values() for r in run.requests}
    plain = {PLAIN: Run(without_nodes([*requests.values()]), batch=3)}
    return plain | RUNS | (CONTROLS if engine == "tree of 16" else {})


def rows_of(device: Device, engine: str) -> list[Row | Broken]:
    """Serve with an engine, and count the answers that differ in any bit, a row per run."""
    runs = runs_of(engine)
    found = device.serve(ENGINES[engine], runs, VLLM_BATCH_INVARIANT="1")
    return [
        Row(device.dtype, engine, name, name in CONTROLS, _verdict(run, found[name], runs, found))
        for name, run in runs.items()
        if name != PLAIN
    ]


def _verdict(
    run: Run, result: Result, runs: Mapping[str, Run], found: Mapping[str, Result]
) -> Verdict:
    apart = differing(run, result, runs[PLAIN], found[PLAIN])
    tokens = sum(len(each) for output in result.outputs if output for each in output.tokens)
    return Verdict(len(run.requests), tokens, 0, len(apart), [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="Report; engines that it holds do not run again.")
    parser.add_argument("--note", default="", help="Text to store in the report.")
    parser.add_argument("--seconds", type=float, default=START_AND_WORK_SECONDS)
    given = parser.parse_args()
    end = time.monotonic() + given.seconds
    record = Record(given.file, given.note)
    for engine in ENGINES:
        if not record.holds(DTYPE, engine):
            try:
                record.add(rows_of(Device(DTYPE, lambda: end - time.monotonic()), engine))
            except (RuntimeError, ValueError) as error:
                record.add([Broken(DTYPE, engine, str(error))])
    print(report(record.found))  # noqa: T201
    sys.exit(not all(row.passed for row in record.found))


if __name__ == "__main__":
    main()

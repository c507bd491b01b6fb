"""An engine whose target's layers come over a virtual link. It runs as a program, as
engine_process.py does."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

from engine_process import Engine, Run, answered, run_of


def serve_offloaded(
    arguments: Mapping[str, Any], run: Run, weights_at: float, *, drafts_too: bool = False
) -> dict[str, Any]:
    """Serve requests while a link of ``weights_at`` GB/s delivers layers.

    With ``drafts_too``, drafts load as vLLM loads them, and their layers come over the link as
    well. Returns the tokens of each request, the bytes of the layers of each model on the link, and
    the mean seconds of each stage in steps that draft.
    """
    engine = {"arguments": dict(arguments), "weights_at": weights_at, "drafts_too": drafts_too}
    return answered(__file__, engine, {"all": run}, threads=1)


@contextmanager
def loaded_as_vllm_does() -> Iterator[None]:
    from vllm_cpu_runner import install

    install()  # must run before the runner's modules are imported
    from dyntree_plugin.engine.drafts.draft_model import TreeSpeculator
    from dyntree_plugin.engine.drafts.head import HeadSpeculator

    stock: Any = TreeSpeculator.load_draft_model
    of_head: Any = HeadSpeculator.load_draft_model
    with (
        mock.patch.object(TreeSpeculator, "load_draft_model", stock.__wrapped__),
        mock.patch.object(HeadSpeculator, "load_draft_model", of_head.__wrapped__),
    ):
        yield


def main(job_path: str, results_path: str) -> None:
    from contextlib import nullcontext

    from vllm.model_executor.offloader import get_offloader

    from benchmarks.serve.slow_weights import linked

    job = json.loads(Path(job_path).read_text())
    own = job["engine"]
    with (
        linked(own["weights_at"]),
        loaded_as_vllm_does() if own["drafts_too"] else nullcontext(),
    ):
        engine = Engine(own["arguments"])
    result = engine.work(run_of(job["runs"]["all"]))
    offloader: Any = get_offloader()
    drafting = [stages for stages in result.stages if stages.get("draft")]
    found = {
        "tokens": [output and output.tokens for output in result.outputs],
        "linked": [sum(model) for model in offloader.models],
        "stages": {
            name: fmean(stages.get(name, 0.0) for stages in drafting) for name in drafting[0]
        },
    }
    Path(results_path).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Count what a step launches on the device, by calling function: python launches.py '{"tokens":
…}'.

It counts operations of torch and Triton, a graph's replay as one, and the operations within our
graphs. Each may be a few launches. "llm" gives engine arguments. With "dyntree": null, it counts
vLLM's own chain. With "head": true, a head of random weights drafts in place of a draft model. With
"hybrid": true, the target is `qwen3_next_of_8_layers`, and its module drafts. Both need tests/ in
PYTHONPATH.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
OURS, THEIRS = "dyntree_plugin", "vllm"
FREE = (
    "empty", "alias", "view", "_unsafe_view", "detach", "_local_scalar", "is_pinned", "pin_memory",
    "lift",
)  # fmt: skip
"""Prefixes of the names of operations that launch nothing."""


class Launches(TorchDispatchMode):
    """Count launches by (package, file, function) while it is entered."""

    def __init__(self, device: str = "cuda") -> None:
        super().__init__()
        self.counts: Counter[tuple[str, str, str]] = Counter()
        self._device = device
        self._inside_triton = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        result = func(*args, **kwargs)
        if not self._is_free(func) and self._on_device(args, kwargs, result):
            self.add()
        return result

    def add(self) -> None:
        self.counts[_asker(sys._getframe(2))] += 1

    @staticmethod
    def _is_free(func: Any) -> bool:
        name = func.name().split("::")[-1]
        aliases = any(
            r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns
        )
        return aliases or name.startswith(FREE)

    def _on_device(self, *values: Any) -> bool:
        found = torch.utils._pytree.tree_leaves(values)
        return any(isinstance(x, torch.Tensor) and x.device.type == self._device for x in found)


def _asker(frame: FrameType | None) -> tuple[str, str, str]:
    """Return our innermost function on the stack, or vLLM's."""
    theirs = (THEIRS, "?", "?")
    while frame is not None:
        path, name = frame.f_code.co_filename, frame.f_code.co_qualname
        if f"/{OURS}/" in path:
            return OURS, path.split(f"/{OURS}/")[-1], name
        if theirs[1] == "?" and "/vllm/v1/" in path:
            theirs = THEIRS, path.split("/vllm/v1/")[-1], name
        frame = frame.f_back
    return theirs


@contextmanager
def counted() -> Iterator[Launches]:
    """Count on CUDA, including Triton's kernels and replays of graphs."""
    import triton

    launches = Launches()
    replay = torch.cuda.CUDAGraph.replay

    def counting_replay(graph: torch.cuda.CUDAGraph) -> None:
        launches.add()
        replay(graph)

    run = triton.runtime.jit.JITFunction.run

    def counting_run(kernel: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        if not warmup:
            launches.add()
        return run(kernel, *args, warmup=warmup, **kwargs)

    with (
        mock.patch.object(torch.cuda.CUDAGraph, "replay", counting_replay),
        mock.patch.object(triton.runtime.jit.JITFunction, "run", counting_run),
        launches,
    ):
        yield launches


@contextmanager
def captured() -> Iterator[dict[str, list[Counter[tuple[str, str, str]]]]]:
    """Count the launches within our graphs for one request: by captured function, and by graph."""
    from dyntree_plugin.engine.cuda.graphs import RequestGraphs

    counts: dict[str, list[Counter[tuple[str, str, str]]]] = {}
    stock = RequestGraphs.capture

    def capture(graphs: Any, record: Any, *places: slice) -> None:
        if places:  # vLLM's profile of memory, which captures large batches alone
            stock(graphs, record, *places)
            return
        function = getattr(graphs._function, "func", graphs._function)
        of_sizes = []

        def counting(run: Any) -> Any:
            with counted() as launches:
                replay, values = record(run)
            # The call runs once before it is captured. torch runs the recorder's own operations
            # before the graph begins, to register the generator's state.
            halves = {
                key: number // 2
                for key, number in launches.counts.items()
                if not key[2].startswith("recorder.")
            }
            of_sizes.append(Counter(halves))
            graph = replay.__self__
            return (lambda: graph.replay()), values  # looks up ``replay``, which may be patched

        stock(graphs, counting)
        counts.setdefault(function.__qualname__, []).append(of_sizes[-1])

    with mock.patch.object(RequestGraphs, "capture", capture):
        yield counts


def decode(llm: Any, prompts: list[str], tokens: int, warm: int, steps: int, **params: Any) -> Any:
    """Return the launches of ``steps`` steps in which all requests decode."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    for number, prompt in enumerate(prompts):
        each = SamplingParams(max_tokens=tokens, seed=number, ignore_eos=True, **params)
        engine.add_request(f"counted-{number}", prompt, each)
    for _ in range(warm):
        engine.step()
    with counted() as launches:
        for _ in range(steps):
            engine.step()
    return launches.counts


def table(counts: Counter[tuple[str, str, str]], steps: int, write: Callable[[str], Any]) -> None:
    for package in (OURS, THEIRS):
        own = {key: n for key, n in counts.items() if key[0] == package}
        write(f"{sum(own.values()) / steps:7.1f}  {package}\n")
        for (_, path, name), number in sorted(own.items(), key=lambda item: -item[1]):
            write(f"{number / steps:9.1f}  {path} {name}\n")


def speculation(head: bool) -> dict[str, str]:
    """Return vLLM's method and model: a head's or the embedded draft model's."""
    if not head:
        from dyntree_plugin import pair

        return {"method": "draft_model", "model": str(pair.paths()["draft"])}
    from heads import random_head

    folder = Path(tempfile.mkdtemp(prefix="dyntree-head-"))
    return {"method": "eagle3", "model": str(random_head(folder))}


def of_hybrid() -> dict[str, Any]:
    """Return what an engine takes of the target, and what drafts for it."""
    from random_targets import qwen3_next_of_8_layers

    folder = Path(tempfile.mkdtemp(prefix="dyntree-hybrid-"))
    target = qwen3_next_of_8_layers(folder)
    speculation = {"method": "mtp", "model": target["model"], "num_speculative_tokens": 16}
    return target | {"speculative_config": speculation}


def main(config: dict[str, Any]) -> None:
    from vllm import LLM

    from dyntree_plugin import pair

    options = config.get("dyntree", {"budget": "fixed"})  # every step verifies a whole tree
    arguments: dict[str, Any] = {
        "model": str(pair.paths()["target"]),
        "dtype": "bfloat16",
        "max_model_len": 512,
        "max_num_seqs": 8,
        "speculative_config": {
            **speculation(config.get("head", False)),
            "num_speculative_tokens": config.get("nodes", 16),
        },
        "additional_config": {} if options is None else {"dyntree": options},
    } | (of_hybrid() if config.get("hybrid") else {})
    with captured() as graphs:
        llm = LLM(**arguments | config.get("llm", {}))
    for name, counts in graphs.items():
        sys.stdout.write(f"within each of {len(counts)} graphs of {name}, on average\n")
        table(sum(counts, Counter()), len(counts), sys.stdout.write)
    prompts = pair.held_out_prompts(config.get("requests", 6))
    steps = config.get("steps", 8)
    params = {"temperature": config.get("temperature", 0.0)}
    counts = decode(llm, prompts, config.get("tokens", 200), 8, steps, **params)
    table(counts, steps, sys.stdout.write)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]) if len(sys.argv) > 1 else {})

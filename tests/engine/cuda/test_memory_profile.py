"""vLLM's memory profile runs with what steps with trees hold: their logits, a head's states, and
what their graphs take."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from dyntree_kernels.contracts import BatchRows, DraftDistributions
from dyntree_kernels.drawn import KEPT_TOKENS, DrawnTrees
from dyntree_plugin.engine.drafts import draft_model
from dyntree_plugin.engine.drafts.draft_model import TreeSpeculator
from dyntree_plugin.engine.drafts.head import HeadSpeculator
from dyntree_plugin.engine.step.verify import TreeVerifier

ROWS, REQUESTS, WIDTHS, HIDDEN = 32, 6, (1, 4, 3), 8
PROFILED = pytest.mark.parametrize(
    ("device", "profiled", "expected"),
    [("cuda", True, REQUESTS * max(WIDTHS)), ("cuda", False, REQUESTS), ("cpu", True, REQUESTS)],
)


def batch() -> Any:
    ids = torch.zeros(ROWS + 3)
    return SimpleNamespace(num_tokens=ROWS, num_reqs=REQUESTS, input_ids=ids, positions=ids)


def runner_of(most_tokens: int, verifier: Any, logits: Callable[[torch.Tensor], Any]) -> Any:
    """Return a runner that knows what its rows need: trees of 16 nodes."""
    pytest.importorskip("triton", reason="the runner on CUDA needs it")
    from dyntree_plugin.engine.cuda.runner import TreeGPUModelRunner

    runner: Any = object.__new__(TreeGPUModelRunner)
    vars(runner).update(
        trees=SimpleNamespace(shape=SimpleNamespace(node_budget=16)),
        max_num_tokens=most_tokens,
        verifier=verifier,
        model=SimpleNamespace(compute_logits=logits),
    )
    return runner


@PROFILED
def test_the_widest_forward_of_every_draft_is_profiled(
    device: str, profiled: bool, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits of all drafts of a pool are held at once."""
    seen: list[tuple[str, int]] = []
    mixed: list[int] = []
    monkeypatch.setattr(draft_model, "mixture", lambda every: mixed.extend(map(len, every)))

    def draft(name: str, **more: Any) -> Any:
        return SimpleNamespace(
            vocab_size=9,
            _run_model=lambda ids, *_: torch.zeros(len(ids), 2),
            compute_draft_logits=partial(logits, name),
            **more,
        )

    def logits(name: str, hidden: torch.Tensor, _: int) -> torch.Tensor:
        seen.append((name, len(hidden)))
        return torch.zeros(len(hidden), 9)

    growing, shape = SimpleNamespace(widths=WIDTHS), SimpleNamespace(block=0)
    plan = SimpleNamespace(growing=growing, shape=shape)
    speculator = draft(
        "first",
        draft_tokens=SimpleNamespace(device=SimpleNamespace(type=device)),
        compose=SimpleNamespace(trees=SimpleNamespace(plan=plan, vocabulary=9)),
        further=[draft("second")],
    )
    speculator.rows_of_logits = partial(TreeSpeculator.rows_of_logits, speculator)
    TreeSpeculator.rehearse(speculator, batch(), (), most_logits=profiled)
    assert seen == [("first", expected), ("second", expected)]
    assert mixed == [expected] * 2


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> HeadSpeculator:
    """Return a speculator that vLLM has made, and of which it has loaded and set nothing yet."""

    def made(speculator: Any, *_: Any) -> None:
        vars(speculator).update(
            max_num_reqs=REQUESTS,
            hidden_size=HIDDEN,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
        )

    monkeypatch.setattr(DraftModelSpeculator, "__init__", made)
    growing, shape = SimpleNamespace(widths=WIDTHS), SimpleNamespace(max_depth=5, block=0)
    plan = SimpleNamespace(growing=growing, shape=shape, scratch_slots=sum(WIDTHS))
    compose: Any = SimpleNamespace(trees=SimpleNamespace(plan=plan))
    config: Any = None
    return HeadSpeculator(config, torch.device("cpu"), None, compose)


@PROFILED
def test_every_row_and_the_widest_forward_of_a_head_are_profiled(
    device: str, profiled: bool, expected: int, head: HeadSpeculator
) -> None:
    seen: list[int] = []

    def run(ids: torch.Tensor, _: Any, states: torch.Tensor, *__: Any) -> Any:
        assert states.shape == (ROWS, 3 * HIDDEN)
        return states, states

    vars(head).update(
        draft_tokens=SimpleNamespace(device=SimpleNamespace(type=device)),
        combine=lambda hidden: hidden,
        run=run,
        compute_draft_logits=lambda hidden, _: seen.append(len(hidden)),
    )
    states = torch.zeros(ROWS + 3, HIDDEN)
    head.rehearse(batch(), (states,) * 3, most_logits=profiled)
    assert seen == [expected]


@pytest.mark.parametrize("copies", [1, 5])
@pytest.mark.parametrize(("most_tokens", "expected"), [(1000, REQUESTS * 17), (40, 40)])
def test_every_row_of_the_trees_is_profiled(
    most_tokens: int, expected: int, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(len(hidden))
        return torch.zeros(len(hidden), 8)

    runner = runner_of(most_tokens, SimpleNamespace(copies=copies, keeps_logits=False), logits)
    monkeypatch.setattr(
        GPUModelRunner, "_dummy_sampler_run", lambda _, hidden: seen.append(len(hidden))
    )
    runner._dummy_sampler_run(torch.zeros(REQUESTS, 2))
    assert seen == [expected, REQUESTS]


@pytest.mark.parametrize(("chunk", "copies_of_all"), [(1 << 30, 1), (64, 2)])
def test_processed_logits_that_are_kept_are_profiled(
    chunk: int, copies_of_all: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rules that read distributions, and logprobs of these, keep them for every row; several chunks
    are joined besides.

    Control: other rules keep one chunk.
    """
    pytest.importorskip("triton", reason="the runner on CUDA needs it")
    from dyntree_plugin.engine.cuda import runner as of_cuda

    vocabulary, rows = 8, REQUESTS * 17
    held: list[int] = []

    def sampled(*_: Any) -> None:
        kept = sys._getframe(1).f_locals["kept"]
        held.append(sum(each.nbytes for each in kept))

    monkeypatch.setattr(of_cuda, "MAX_CHUNK_BYTES", chunk)
    monkeypatch.setattr(GPUModelRunner, "_dummy_sampler_run", sampled)
    cases = ("raw_logprobs", False), ("raw_logprobs", True), ("processed_logprobs", False)
    for mode, reads_distributions in cases:
        verifier: Any = object.__new__(TreeVerifier)
        verifier.copies, verifier.sampler = 1, SimpleNamespace(logprobs_mode=mode)
        verifier._walk = SimpleNamespace(reads_logits=reads_distributions)
        runner = runner_of(
            1000, verifier, lambda hidden: torch.zeros(len(hidden), vocabulary).bfloat16()
        )
        runner._dummy_sampler_run(torch.zeros(REQUESTS, 2))
    without, with_laws, with_logprobs = held
    assert with_laws == with_logprobs == without + copies_of_all * 4 * rows * vocabulary


class Allocated(TorchDispatchMode):
    """Adds up the bytes that are allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        given = [each for each in args if isinstance(each, torch.Tensor)]
        if isinstance(found, torch.Tensor) and not any(map(found.is_set_to, given)):
            self.bytes += 0 if found._base is not None else found.nbytes
        return found


@pytest.mark.parametrize("rows", [1088, 1024 * 65])
def test_deciding_on_drawn_trees_takes_little_of_what_the_profile_has_kept(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two copies of the processed logits is free by then. Batches may have few rows."""
    pytest.importorskip("triton", reason="the kernels need it")
    from dyntree_kernels.cuda import traversal

    requests, nodes, vocabulary = 1024, 64, 128_256

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    for kernel in ("_add_up", "_accept", "_draw", "_emit"):
        monkeypatch.setattr(traversal, kernel, defaultdict(lambda: lambda *_, **__: None))
    laws = DraftDistributions(*(empty(requests, 9, KEPT_TOKENS["cuda"]) for _ in range(2)))
    of_nodes = empty(requests, nodes)
    drawn = DrawnTrees(laws, *(empty(requests) for _ in range(3)), of_nodes, of_nodes)
    of_rows, of_requests = empty(rows), empty(requests)
    batch = BatchRows(empty(requests, 9), *(of_rows,) * 3, of_requests, of_rows)
    logits = empty(rows, vocabulary, dtype=torch.float32)
    with Allocated() as allocated:
        traversal.decide_trees(batch, logits, drawn)
    assert 0 < allocated.bytes < logits.nbytes / 200


def test_graphs_that_the_profile_does_not_capture_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton", reason="the runner on CUDA needs it")
    from dyntree_plugin.engine.cuda import runner as of_cuda
    from dyntree_plugin.engine.cuda.captured import CapturedStages
    from dyntree_plugin.engine.cuda.graphs import Input, RequestGraphs

    sizes: list[int] = []

    def record(run: Any) -> Any:
        sizes.append(len(run()[0]))
        return None, ()

    graphs = RequestGraphs(lambda x: (x,), [Input(torch.zeros(8))], (1, 2, 4, 8))
    drafting: Any = SimpleNamespace(
        stages=[graphs], capture=lambda record, hidden: graphs.capture(record)
    )
    verified: list[int] = []
    placed: list[int] = []
    captured: Any = CapturedStages(lambda _: drafting, lambda: nullcontext(record))
    captured.capture_verification = lambda _, most: verified.append(most)
    captured.capture_placing = lambda *arrays_and_most: placed.append(arrays_and_most[-1])
    captured.prepare(object())

    def stock(runner: Any, profile_only: bool = False) -> int:
        captured.capture()
        return 100 * len(sizes)

    monkeypatch.setattr(of_cuda, "free_memory", lambda: -100 * len(sizes))
    monkeypatch.setattr(GPUModelRunner, "capture_model", stock)
    runner: Any = object.__new__(of_cuda.TreeGPUModelRunner)
    vars(runner).update(graphs=captured, max_num_reqs=8, verifier=None, trees=None)
    vars(runner).update(input_buffers=None, ops=SimpleNamespace(masks="masks"))
    estimate = runner.capture_model(profile_only=True)
    assert (sizes, verified, placed) == ([8, 4], [], [])
    sizes.clear()
    assert runner.capture_model() == estimate == 400
    assert (sizes, verified, placed) == ([8, 4, 2, 1], [8], [8])

"""What an engine rehearsed is forgotten before it measures its steps and serves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from dyntree_plugin.engine.cpu import worker as cpu
from dyntree_plugin.engine.cpu.runner import TreeCPUModelRunner
from dyntree_plugin.engine.cuda import worker as cuda
from dyntree_plugin.engine.cuda.worker import TreeGPUWorker
from dyntree_plugin.engine.step import clock
from dyntree_plugin.engine.step.records import Step
from dyntree_plugin.tree.value import AcceptanceEstimate


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_worker_measures_after_it_has_rehearsed_and_forgotten(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(cpu, "rehearse", lambda worker: done.append("rehearse"))
    for module in (cpu, cuda):
        monkeypatch.setattr(module, "set_random_seed", lambda *of: done.append(f"seed {of}"))
    for stock in (CPUWorker, Worker):
        monkeypatch.setattr(
            stock, "compile_or_warm_up_model", lambda self: done.append("stock rehearses")
        )
        monkeypatch.setattr(stock, "_maybe_activate_jit_monitor", lambda self: None, raising=False)
    worker: Any = object.__new__(cpu.TreeCPUWorker if device == "cpu" else TreeGPUWorker)
    worker.model_runner = SimpleNamespace(
        warm_up_rare_kernels=lambda: done.append("rehearse"),
        forget_rehearsal=lambda: done.append("forget"),
        measure_costs=lambda: done.append("measure"),
    )
    worker.model_config = worker.parallel_config = SimpleNamespace(seed=7, data_parallel_index=1)
    worker.compile_or_warm_up_model()
    assert done == ["stock rehearses", "rehearse", "forget", "measure", "seed (7, 1)"]


def test_nothing_of_a_rehearsal_is_left_in_the_values_of_nodes_and_in_earlier_steps() -> None:
    runner: Any = object.__new__(TreeCPUModelRunner)
    runner.pipeline_stages = 2
    runner.estimate = AcceptanceEstimate("cpu")
    before = [runner.estimate.weights.clone(), runner.estimate.information.clone()]
    runner.estimate.weights += 1
    runner.estimate.information += torch.eye(3)
    rehearsed = Step()
    runner.step, runner._earlier = rehearsed, [rehearsed]
    runner.forget_rehearsal()
    assert runner.step is not rehearsed
    assert runner.previous is not rehearsed
    after = [runner.estimate.weights, runner.estimate.information]
    assert all(map(torch.equal, before, after))


def test_what_a_rank_runs_for_others_is_no_time_of_its_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now)
    of_runner = clock.StageClock()
    monkeypatch.setattr(Worker, "execute_dummy_batch", lambda self: of_runner.next("target"))
    worker: Any = object.__new__(TreeGPUWorker)
    worker.model_runner = SimpleNamespace(clock=of_runner)
    worker.execute_dummy_batch()
    now = 60.0
    of_runner.next("target")
    now = 62.0
    assert of_runner.split().seconds()["target"] == 2

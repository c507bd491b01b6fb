"""Verification in a padded batch at fixed addresses equals eager verification, and ignores padding.

Batches hold whole trees, a cut one, a cleared slot, and complete and incomplete prompts.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from noted_kernels import Kernel
from replays import rerun

from dyntree_kernels.contracts import Walk
from dyntree_kernels.cpu.learn import learn
from dyntree_kernels.cpu.walk import walk as compiled_walk
from dyntree_plugin.engine.attention.cpu import PathMover
from dyntree_plugin.engine.cuda import captured as capturing
from dyntree_plugin.engine.cuda.captured import CapturedStages
from dyntree_plugin.engine.cuda.captured_catch_up import StateInputs
from dyntree_plugin.engine.cuda.graphs import Record
from dyntree_plugin.engine.drafts.base import TreeProposals
from dyntree_plugin.engine.layer_kinds import AcceptedPaths, Keeper
from dyntree_plugin.engine.runner import TreeRunnerMixin
from dyntree_plugin.engine.step.clock import StageClock
from dyntree_plugin.engine.step.records import Drafted, Emitted, Step
from dyntree_plugin.engine.step.requests import Packer, Requests
from dyntree_plugin.engine.step.sampled_walk import SampledWalk
from dyntree_plugin.engine.step.trees import TreeStore
from dyntree_plugin.engine.step.verify import TreeVerifier
from dyntree_plugin.options.options import DynTreeOptions
from dyntree_plugin.tree.token_tree import TokenTree
from dyntree_plugin.tree.value import AcceptanceEstimate

NODES, VOCAB, SLOTS, MOST = 6, 2, 9, 8
PLAN = DynTreeOptions(max_depth=3, budget="adaptive").resolve(NODES)
LEARNED = 2e-2
"""What the estimate has learned at least."""
IN_USE = [3, 0, 7, 2, 5]
DRAFTS = [6, 6, 3, 6, 0]
ROWS = [7, 7, 4, 7, 9]
PREFILL = [10, 4, 6, 5, 99]
CONTEXTS = [20, 30, 25, 40, 0]
CLEARED = 2


class Engine:
    """Inputs and state of a step's verification. They are the same for equal arguments."""

    def __init__(self, requests: int, walk: Walk = compiled_walk) -> None:
        g = torch.Generator().manual_seed(1)
        self.trees = trees = TreeStore(SLOTS, PLAN, VOCAB, torch.device("cpu"))
        # Every slot has three levels of two siblings, each below the first node of the level above.
        parents = torch.tensor([-1, -1, 0, 0, 2, 2]).repeat(SLOTS, 1)
        depths = torch.tensor([1, 1, 2, 2, 3, 3]).repeat(SLOTS, 1)
        values = -torch.rand(SLOTS, NODES, generator=g)
        counts = torch.full((SLOTS,), NODES)
        node_tokens = torch.tensor([0, 1]).repeat(SLOTS, 3)
        tree = TokenTree(node_tokens, parents, depths, values, counts)
        trees.put(torch.arange(SLOTS), tree)
        trees.features.normal_(generator=g)
        trees.clear(torch.tensor([CLEARED]))

        rows = sum(ROWS[:requests])
        ends = np.cumsum([0, *ROWS[:requests]])
        input_ids, positions = torch.zeros(rows + 5).int(), torch.zeros(rows + 5).long()
        for end, drafts, context in zip(ends[1:], DRAFTS, CONTEXTS, strict=False):
            input_ids[end - drafts : end] = torch.tensor([0, 1, 0, 1, 0, 1])[:drafts]
            positions[end - drafts - 1 : end] = context
        seq_lens = torch.tensor(CONTEXTS) + torch.tensor(ROWS)
        buffers: Any = SimpleNamespace(
            input_ids=input_ids, positions=positions, seq_lens=torch.zeros(MOST).int(),
            device=torch.device("cpu"),
        )  # fmt: skip
        buffers.seq_lens[:requests] = seq_lens[:requests]
        self.cache = torch.arange(rows + 5).int()
        self.estimate = AcceptanceEstimate("cpu")
        self.committed = torch.full((SLOTS + 1, PLAN.shape.max_depth + 2), -1)
        mover = PathMover(self.move)
        keepers = [
            Keeper(torch.arange(rows + 5), lambda of, slots: mover(of.path, of.roots, slots)),
            Keeper(torch.arange(MOST) + 100, self.commit),
        ]
        ops: Any = SimpleNamespace(walk=walk, learn=learn, perturb=None, clock=StageClock())
        sampler: Any = SimpleNamespace()
        self.record: Record = rerun
        never: Any = None
        self.graphs = CapturedStages(never, lambda: nullcontext(self.record))
        self.verifier = TreeVerifier(
            sampler,
            trees,
            self.estimate,
            ops,
            self.graphs,
            walk=SampledWalk(trees, walk),
            buffers=buffers,
            keepers=lambda: keepers,
        )
        self.packed = packed(requests)
        logits = sum(DRAFTS[:requests]) + requests
        self.sampled = torch.randint(VOCAB, (logits,), generator=g)

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        moves = source >= 0
        self.cache[target[moves]] = self.cache[source[moves]]

    def commit(self, accepted: AcceptedPaths, states: torch.Tensor) -> None:
        """Note the root's row, the accepted nodes and the state of each request; padding has the
        slot of nobody."""
        path, roots, requests = accepted
        of = [roots[:, None], path, states[: len(path), None]]
        self.committed[requests] = torch.cat(of, dim=1)

    def capture(self, record: Record) -> None:
        self.record = record
        self.graphs.capture_verification(self.verifier, MOST)

    def walk(self, invalid: torch.Tensor | None) -> None:
        """Walk eagerly, and drop the result."""
        room = self.verifier.allocate(len(self.packed))
        requests, no_logits = Requests(self.packed, SLOTS), torch.zeros(0, 0)
        self.verifier.walk(requests, self.sampled, invalid, room, no_logits)

    def verify(self, invalid: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Verify and learn; return the results and all changed state."""
        walked, learning = self.verifier.verify(self.packed, self.sampled, self.sampled, invalid)
        assert learning is not None
        learning()
        learned = [self.estimate.weights, self.estimate.information]
        return [each.clone() for each in (*walked, self.cache, self.committed[:-1], *learned)]


def batch_of(requests: int) -> Any:
    drafts, rows = DRAFTS[:requests], ROWS[:requests]
    return SimpleNamespace(
        num_reqs=requests,
        idx_mapping_np=np.array(IN_USE[:requests]),
        cu_num_logits_np=np.cumsum([0, *(n + 1 for n in drafts)], dtype=np.int32),
        query_start_loc_np=np.cumsum([0, *rows, 0], dtype=np.int32),
        prefill_len_np=np.array(PREFILL[:requests], dtype=np.int32),
    )


STATES: Any = SimpleNamespace(
    temperature=SimpleNamespace(np=np.linspace(0, 2, SLOTS, dtype=np.float32)),
    seeds=SimpleNamespace(np=np.arange(SLOTS) - (1 << 40)),
)
LONGEST = np.arange(SLOTS) + 100


def packed(requests: int) -> torch.Tensor:
    return Packer()(batch_of(requests), STATES, LONGEST)


def same(ours: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Return whether two results of `Engine.verify` are equal."""
    return all(map(torch.equal, ours, others))


def runner_of(verifier: Any) -> Any:
    """Return a runner that knows no more than what it needs to verify."""
    runner: Any = object.__new__(TreeRunnerMixin)
    runner.verifier = verifier
    runner.sampler = SimpleNamespace(sampling_states=STATES)
    runner.req_states = SimpleNamespace(max_seq_len=LONGEST)
    runner._pack = Packer()
    return runner


def test_a_batch_is_packed_once_in_a_step_and_anew_in_each() -> None:
    runner = runner_of(None)
    for requests in (5, 2, 5):
        runner.step = Step()
        first = runner.packed(batch_of(requests))
        assert torch.equal(first, packed(requests))
        assert runner.packed(batch_of(requests)) is first


@pytest.mark.parametrize("captured", [False, True])
def test_learning_waits_for_drafting_and_comes_before_growth(captured: bool) -> None:
    """The output leaves for the host between verification and drafting."""
    engine, at_once = Engine(5), Engine(5)
    if captured:
        engine.capture(rerun)
    grown_with: list[torch.Tensor] = []

    def run(*_: Any) -> Any:
        sampled = engine.sampled
        return None, *engine.verifier.verify(engine.packed, sampled, sampled, None)

    def draft(*_: Any, **__: Any) -> Drafted:
        grown_with.append(engine.estimate.weights.clone())
        return Drafted(None, 0, None)

    runner = runner_of(SimpleNamespace(run=run))
    speculator: Any = object.__new__(TreeProposals)
    speculator.steps = runner
    speculator.compose = SimpleNamespace(ops=SimpleNamespace(clock=StageClock()))
    speculator.drafter = SimpleNamespace(draft=draft)
    speculator.draft_tokens = torch.zeros(5, 1)

    def propose() -> None:
        speculator.propose(batch_of(5), {}, {}, *[None] * 5, [None], None, None)

    for _ in range(2):
        before = at_once.estimate.weights.clone()
        at_once.verify()
        runner.step = Step()
        runner.verify(None, batch_of(5), None)
        assert torch.equal(engine.estimate.weights, before)
        propose()
        assert torch.equal(grown_with[-1], at_once.estimate.weights)
        assert not torch.equal(grown_with[-1], before)
    # A step that verifies nothing learns nothing.
    runner.step = Step()
    propose()
    assert torch.equal(grown_with[-1], at_once.estimate.weights)


@pytest.mark.parametrize("requests", [1, 3, 5])
def test_a_padded_batch_does_what_the_eager_one_does(requests: int) -> None:
    eager, captured = Engine(requests), Engine(requests)
    captured.capture(rerun)
    for _ in range(2):
        found = eager.verify()
        assert same(captured.verify(), found)
    path, counts, emitted = found[0], found[4], found[5]
    if requests == 5:
        assert (path >= 0).sum(dim=1).tolist()[3:] == [0, 0]
        assert counts.tolist() == [6, 6, 3, 0, 0]
        assert emitted.tolist()[4] == 0
        assert len(path[:3].unique()) > 2
        assert not torch.equal(eager.cache, torch.arange(len(eager.cache)))
        learned = eager.estimate.weights - AcceptanceEstimate("cpu").weights
        assert learned.abs().max() > LEARNED


def test_drafting_reads_what_verification_wrote() -> None:
    """The requests are copied once, and what they got is not copied."""
    eager, captured = Engine(3), Engine(3)
    width = PLAN.shape.max_depth + 1
    emitted = Emitted(
        torch.zeros(MOST).long(), torch.zeros(MOST, width).long(), torch.zeros(MOST).int(), width
    )
    requests = capturing.packed_input(MOST, torch.device("cpu"))
    states = StateInputs([torch.zeros(1, 1)], MOST, 1, width - 1)
    catch_up = SimpleNamespace(states=states)
    drafting: Any = SimpleNamespace(packed=requests, emitted=emitted, catch_up=catch_up)
    captured.graphs._drafting = drafting
    captured.capture(rerun)
    found = captured.verify()
    assert same(found, eager.verify())
    assert torch.equal(requests.buffer[:3], captured.packed)
    got = (states.path, emitted.tokens, states.root_rows, emitted.roots, emitted.counts)
    there = zip(got, (0, 1, 2, 3, 5), strict=True)
    assert all(torch.equal(ours[:3], found[at]) for ours, at in there)
    # Padding requests read rows that every batch has.
    assert states.path[3:].max() == -1
    assert states.root_rows[3:].max() == 0
    assert emitted.counts[:3].min() > 0


def test_padding_that_is_taken_for_a_request_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capturing, "PADDING", 0)
    eager, captured = Engine(3), Engine(3)
    captured.capture(rerun)
    # The first step forgets nothing, because the estimate begins at its prior.
    for engine in (eager, captured):
        engine.verify()
    assert not same(captured.verify(), eager.verify())


def test_what_the_capture_ran_leaves_nothing_behind() -> None:
    engine = Engine(5)
    cache, weights = engine.cache.clone(), engine.estimate.weights.clone()
    information = engine.estimate.information.clone()
    engine.capture(rerun)
    assert torch.equal(engine.cache, cache)
    assert torch.equal(engine.estimate.weights, weights)
    assert torch.equal(engine.estimate.information, information)


def test_drafts_that_a_grammar_forbids_are_verified_eagerly() -> None:
    eager, captured = Engine(2), Engine(2)
    captured.capture(rerun)
    invalid = torch.zeros(14, dtype=torch.bool)
    invalid[1:3] = True
    forbidden = captured.verify(invalid)
    assert same(forbidden, eager.verify(invalid))
    assert forbidden[0][0].tolist() == [-1, -1, -1]
    assert captured.verify()[0][0, 0] >= 0


def test_no_grammar_compiles_a_kernel_while_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    walking = pytest.importorskip("dyntree_kernels.cuda.walk", reason="Triton is not installed")
    noted = Kernel()
    monkeypatch.setattr(walking, "_walk", noted)
    engines = [Engine(requests, walking.walk) for requests in range(1, 6)]
    # Control: vLLM's own rehearsal has trees without a grammar alone.
    engines[0].walk(None)
    plain = {*noted.compiled}
    engines[0].verifier.rehearse()
    rehearsed = {*noted.compiled}
    assert len(rehearsed) == len(plain) + 1
    for engine in engines:
        engine.walk(torch.zeros(len(engine.sampled), dtype=torch.bool))
    assert noted.compiled == rehearsed


def test_a_rehearsed_grammar_leaves_nothing_behind() -> None:
    engine, fresh = Engine(5), Engine(5)
    engine.verifier.rehearse()
    assert same(engine.verify(), fresh.verify())

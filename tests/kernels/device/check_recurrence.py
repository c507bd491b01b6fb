"""Trees through recurrent layers and their commits, against the oracle in float64."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from paged_cases import DEVICE
from reference.recurrence import along
from tree_shapes import chain, random_tree, star

from dyntree_kernels.ancestors import ancestor_bits, unpack_bits
from dyntree_kernels.cuda.recurrence import RecurrentRows, convolve, gated_delta_rule, state_space
from dyntree_kernels.cuda.state_commits import (
    Layers,
    advance_delta_rule,
    advance_state_space,
    keep_history,
)
from dyntree_kernels.recurrence import Commit, inputs

ON_GPU = DEVICE.type == "cuda"
SLOTS = [3, 1, 5, 2]
Alone = Callable[[list[int]], tuple[torch.Tensor, torch.Tensor]]
"""Gives the output of a path's last row, and the state after it, in float64."""
SHAPES = {
    "a word": [random_tree(15, torch.Generator().manual_seed(1)), star(16), [-1], chain(5)],
    "two words": [random_tree(33, torch.Generator().manual_seed(2)), chain(3), [], star(31)],
}
"""Parents of the trees of four requests. The last one is served as a chain."""
STATES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


class Batch(NamedTuple):
    rows: RecurrentRows
    seen: list[torch.Tensor]
    """Of each request, whether a row is another or below it."""


def batch(trees: list[list[int]]) -> Batch:
    most = max(map(len, trees))
    padded = torch.tensor([each + [-1] * (most - len(each)) for each in trees])
    bits = ancestor_bits(padded)
    lengths = torch.tensor([*map(len, trees)])
    starts = torch.cat([torch.zeros(1), lengths.cumsum(0)]).int()
    seen = [unpack_bits(of[:n], most)[:, :n] for of, n in zip(bits, lengths, strict=True)]
    seen[-1] = torch.ones(lengths[-1], lengths[-1]).tril().bool()
    real = torch.arange(most) < lengths[:, None]
    ctx = torch.tensor([7, 0, 40, -1], dtype=torch.int32)
    given = torch.tensor(SLOTS), starts, ctx, bits[real].contiguous()
    return Batch(RecurrentRows(*(each.to(DEVICE) for each in given), most), seen)


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


class Space(NamedTuple):
    """Mamba-2 of four heads in two groups."""

    states: torch.Tensor
    x: torch.Tensor
    dt: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    d: torch.Tensor
    dt_bias: torch.Tensor

    @classmethod
    def make(cls, rows: int, dtype: torch.dtype) -> Space:
        heads, size, width = 4, 24, 48
        states = draw(7, heads, size, width, seed=1).to(dtype)
        x, dt = draw(rows, heads, size, seed=2), draw(rows, heads, seed=3)
        b, c = draw(rows, 2, width, seed=4), draw(rows, 2, width, seed=5)
        a, d, bias = -draw(heads, seed=6).exp(), draw(heads, seed=7), draw(heads, seed=8)
        return cls(states, x, dt, a, b, c, d, bias)

    def run(self, rows: RecurrentRows) -> torch.Tensor:
        out = torch.full_like(self.x, torch.nan)
        state_space(rows, *self, out)
        return out

    def advance(self, accepted: Commit) -> None:
        advance_state_space(accepted, Layers.of([self.committed]))

    @property
    def committed(self) -> tuple[torch.Tensor, ...]:
        return self.x, self.dt, self.b, self.states, self.a, self.dt_bias

    def alone(self, at: slice, state: torch.Tensor) -> Alone:
        """Return what gives the recurrence along paths of the rows ``at``, from this state."""
        step = torch.nn.functional.softplus((self.dt + self.dt_bias)[at].double()).T
        q, k = (
            each[at].double().repeat_interleave(2, 1).transpose(0, 1) for each in (self.c, self.b)
        )
        v, decay = self.x[at].double().transpose(0, 1), self.a[:, None] * step

        def run(path: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
            out, after = along(path, state.double(), q, k, v, step, decay, delta=False)
            return out + v[:, path[-1]] * self.d[:, None], after

        return run

    def state(self, slot: int) -> torch.Tensor:
        return self.states[slot].mT


class Delta(NamedTuple):
    """A gated delta rule of four heads, whose queries and keys have two."""

    states: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    a_log: torch.Tensor | None
    dt_bias: torch.Tensor | None

    @classmethod
    def make(cls, rows: int, dtype: torch.dtype) -> Delta:
        heads, keys, values = 4, 24, 40
        states = draw(7, heads, keys, values, seed=1).to(dtype)
        q, k = draw(rows, 2, keys, seed=2), draw(rows, 2, keys, seed=3)
        v, a, b = (
            draw(rows, heads, values, seed=4),
            draw(rows, heads, seed=5),
            draw(rows, heads, seed=6),
        )
        return cls(states, q, k, v, a, b, draw(heads, seed=7), draw(heads, seed=8))

    def run(self, rows: RecurrentRows) -> torch.Tensor:
        out = torch.full_like(self.v, torch.nan)
        gated_delta_rule(rows, *self, out)
        return out

    def advance(self, accepted: Commit) -> None:
        advance_delta_rule(accepted, Layers.of([self.committed]))

    @property
    def committed(self) -> tuple[torch.Tensor, ...]:
        of_heads = (each for each in (self.a_log, self.dt_bias) if each is not None)
        return self.k, self.v, self.a, self.b, self.states, *of_heads

    @property
    def gates(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Log decays and betas of all rows."""
        if self.a_log is None or self.dt_bias is None:
            return self.a.double(), self.b.double()
        step = torch.nn.functional.softplus((self.a + self.dt_bias).double())
        return -self.a_log.double().exp() * step, self.b.double().sigmoid()

    def alone(self, at: slice, state: torch.Tensor) -> Alone:
        """Return what gives the recurrence along paths of the rows ``at``, from this state."""
        q, k = (
            each[at].double() / (each[at].double().square().sum(-1, keepdim=True) + 1e-6).sqrt()
            for each in (self.q, self.k)
        )
        q, k = (each.repeat_interleave(2, 1).transpose(0, 1) for each in (q, k))
        v, log, beta = (each[at].double().transpose(0, 1) for each in (self.v, *self.gates))
        scaled = q * q.shape[-1] ** -0.5
        return lambda path: along(path, state.double(), scaled, k, v, beta, log, delta=True)

    def state(self, slot: int) -> torch.Tensor:
        return self.states[slot]


class Channels(Delta):
    """As `Delta`, with a decay of every channel."""

    @classmethod
    def make(cls, rows: int, dtype: torch.dtype) -> Channels:
        made = Delta.make(rows, dtype)
        logs = -2 * draw(rows, 4, 24, seed=5).square()
        return cls(*made[:4], logs, made.b.sigmoid(), None, None)


LAYERS = pytest.mark.parametrize("kind", [Space, Delta, Channels])


def paths_of(given: Batch, request: int) -> list[list[int]]:
    """Return the path to each row of a request, from the root down."""
    return [seen.nonzero().flatten().tolist() for seen in given.seen[request]]


def rows_of(given: Batch, request: int) -> slice:
    first, last = given.rows.starts[request : request + 2].tolist()
    return slice(first, last)


def check(layer: Any, given: Batch, found: torch.Tensor) -> None:
    """Compare the outputs of every row with the recurrence along its path."""
    for request, slot in enumerate(SLOTS):
        at = rows_of(given, request)
        alone = layer.alone(at, layer.state(slot))
        for row, path in enumerate(paths_of(given, request), at.start):
            right, _ = alone(path)
            torch.testing.assert_close(found[row].double(), right, rtol=1e-4, atol=1e-4)


@LAYERS
@pytest.mark.parametrize(
    ("shape", "dtype"), [("a word", torch.bfloat16), ("two words", torch.float32)]
)
def test_rows_continue_from_their_parents_and_states_stay(
    kind: Any, shape: str, dtype: torch.dtype
) -> None:
    given = batch(SHAPES[shape])
    layer = kind.make(int(given.rows.starts[-1]), dtype)
    before = layer.states.clone()
    found = layer.run(given.rows)
    assert torch.equal(layer.states, before)
    check(layer, given, found)


@pytest.mark.parametrize("wrong", ["a chain", "another parent", "another's state"])
@LAYERS
def test_other_trees_and_states_give_other_outputs(kind: Any, wrong: str) -> None:
    trees = [SHAPES["a word"][0], [-1], [], []]
    given = batch(trees)
    layer = kind.make(int(given.rows.starts[-1]), torch.float32)
    right, rows = layer.run(given.rows), given.rows
    if wrong == "a chain":
        rows = rows._replace(ctx_lens=torch.full_like(rows.ctx_lens, -1))
    elif wrong == "another parent":
        moved = [*trees[0][:10], (trees[0][10] + 1) % 10, *trees[0][11:]]
        rows = batch([moved, *trees[1:]]).rows
    else:
        rows = rows._replace(slots=rows.slots.roll(1))
    assert (layer.run(rows)[:15] - right[:15]).abs().max() > 1e-2


@pytest.mark.parametrize("strong", [False, True])
@pytest.mark.parametrize("kind", [Delta, Channels])
def test_keys_that_are_alike_and_strong_gates_stay_accurate(kind: Any, strong: bool) -> None:
    given = batch(SHAPES["two words"])
    layer = kind.make(int(given.rows.starts[-1]), torch.float32)
    layer.k.add_(8 * layer.k[:1])
    if kind is Delta:
        layer.a.fill_(15.0 if strong else -8.0)
        layer.b.fill_(4.0)
    else:
        layer.a.mul_(50 if strong else 1e-3)
        layer.b.fill_(0.98)
    found = layer.run(given.rows)
    check(layer, given, found)


def test_the_decay_of_another_channel_gives_other_outputs_and_states() -> None:
    given = batch(SHAPES["a word"])
    total = int(given.rows.starts[-1])
    right, wrong = (Channels.make(total, torch.float32) for _ in range(2))
    wrong.a.copy_(wrong.a.roll(1, dims=2))
    assert (right.run(given.rows) - wrong.run(given.rows)).abs().max() > 1e-2
    for layer in (right, wrong):
        layer.advance(accepted(given.rows))
    assert (right.states - wrong.states).abs().max() > 1e-2


PATHS = [[0, 1], [0, 7], [], [0, 1, 2, 3]]
"""Accepted rows of each request of the first batch."""
ENDS, END_SLOTS = [1, 3, 1, 4], [4, 6, 6, 0]
"""After so many of them a block ends, in the first path and with the last one."""


def accepted(rows: RecurrentRows) -> Commit:
    first = rows.starts[:-1].long()
    padded = torch.tensor([path + [-1] * (4 - len(path)) for path in PATHS]).to(DEVICE)
    paths = torch.where(padded >= 0, padded + first[:, None], -1)
    given = [*map(len, PATHS)], ENDS, END_SLOTS
    return Commit(rows.slots, paths, *(torch.tensor(each).to(DEVICE) for each in given))


@LAYERS
@STATES
def test_a_commit_takes_states_along_the_accepted_path(kind: Any, dtype: torch.dtype) -> None:
    given = batch(SHAPES["a word"])
    layer = kind.make(int(given.rows.starts[-1]), dtype)
    wanted = {}
    for r, (slot, path) in enumerate(zip(SLOTS, PATHS, strict=True)):
        state = layer.state(slot).double()
        alone = layer.alone(rows_of(given, r), state)
        wanted[slot] = alone(path)[1] if path else state
        if ENDS[r] <= len(path):
            wanted[END_SLOTS[r]] = alone(path[: ENDS[r]])[1]
    before = layer.states.clone()
    layer.advance(accepted(given.rows))
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 5e-2}
    for slot, right in wanted.items():
        torch.testing.assert_close(layer.state(slot).double(), right, **close)
    assert {*wanted} == {0, 1, 2, 3, 4, 5}
    for slot in (5, 6):
        assert torch.equal(layer.states[slot], before[slot])


@pytest.mark.parametrize(("shape", "silu"), [("a word", False), ("two words", True)])
def test_convolutions_read_ancestors_then_the_history(shape: str, silu: bool) -> None:
    given = batch(SHAPES[shape])
    total, channels, width = int(given.rows.starts[-1]), 150, 4
    history, raw = draw(7, width - 1, channels, seed=1), draw(total, channels, seed=2)
    weight, bias = draw(channels, width, seed=3), draw(channels, seed=4)
    out = torch.full_like(raw, torch.nan)
    stored = history.transpose(1, 2).contiguous().transpose(1, 2)  # vLLM has both orders
    kept = torch.full_like(raw, torch.nan)
    convolve(given.rows, stored, raw, weight, bias, silu, out, kept)
    assert torch.equal(kept, raw)
    for r, slot in enumerate(SLOTS):
        first = int(given.rows.starts[r])
        for i, seen in enumerate(given.seen[r]):
            rows = torch.cat([history[slot], raw[first + seen.nonzero().flatten().to(DEVICE)]])
            right = (rows[-width:] * weight.T).sum(0) + bias
            right = torch.nn.functional.silu(right) if silu else right
            torch.testing.assert_close(out[first + i], right, rtol=1e-4, atol=1e-4)


def test_histories_end_with_the_inputs_of_the_path() -> None:
    given = batch(SHAPES["a word"])
    history, raw = draw(7, 3, 150, seed=1), draw(int(given.rows.starts[-1]), 150, seed=2)
    commit = accepted(given.rows)
    right = history.clone()
    right[commit.slots] = inputs(commit.taps(3), raw, history, commit.slots)
    ended = Commit(*(each[[0, 3]] for each in commit))
    until = ended._replace(lengths=ended.ends)
    right[ended.end_slots] = inputs(until.taps(3), raw, history, ended.slots)
    keep_history(commit, Layers.of([(raw, history)]))
    assert torch.equal(history, right)


@LAYERS
def test_one_launch_advances_every_layer_by_its_inputs(kind: Any) -> None:
    commit = accepted(batch(SHAPES["a word"]).rows)
    layers = [kind.make(64, torch.float32) for _ in range(3)]
    for number, layer in enumerate(layers):
        for each in layer[1:6]:
            each.mul_(1 + number)
    alone = [layer._replace(states=layer.states.clone()) for layer in layers]
    for layer in alone:
        layer.advance(commit)
    advance = advance_state_space if kind is Space else advance_delta_rule
    advance(commit, Layers.of([layer.committed for layer in layers]))
    for layer, right in zip(layers, alone, strict=True):
        assert torch.equal(layer.states, right.states)
    assert not torch.equal(layers[0].states, layers[1].states)


def test_one_launch_keeps_the_history_of_every_layer() -> None:
    commit = accepted(batch(SHAPES["a word"]).rows)
    layers = [(draw(64, 150, seed=n), draw(7, 3, 150, seed=9 + n)) for n in range(3)]
    alone = [(raw, history.clone()) for raw, history in layers]
    for each in alone:
        keep_history(commit, Layers.of([each]))
    keep_history(commit, Layers.of(layers))
    for (_, history), (_, right) in zip(layers, alone, strict=True):
        assert torch.equal(history, right)
    with pytest.raises(ValueError, match="one shape"):
        Layers.of([*layers, (draw(64, 150, seed=4), draw(7, 3, 151, seed=5))])


@LAYERS
def test_many_steps_of_random_paths_are_the_recurrence(kind: Any) -> None:
    g = torch.Generator().manual_seed(3)
    run = kind.make(64, torch.float32)
    state, follow = run.state(3).double().clone(), torch.tensor([3]).to(DEVICE)
    for step in range(64 if ON_GPU else 6):
        tree = random_tree(9, g)
        fresh = kind.make(9, torch.float32)
        layer = fresh._replace(states=run.states)
        for each in layer[1:3]:
            each.add_(step)
        path = [int(torch.randint(9, (1,), generator=g))]
        while tree[path[0]] >= 0:
            path.insert(0, tree[path[0]])
        state = layer.alone(slice(0, 9), state)(path)[1]
        length = torch.tensor([len(path)]).to(DEVICE)
        layer.advance(Commit(follow, torch.tensor([path]).to(DEVICE), length, 0 * follow, follow))
    torch.testing.assert_close(run.state(3).double(), state, rtol=1e-3, atol=1e-3)


if __name__ == "__main__":
    sys.exit(pytest.main([str(Path(__file__)), "-q"]))

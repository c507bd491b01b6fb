"""The replacement of CUDA in test_emulated_cuda is as strict as CUDA."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import pytest
import torch
from emulated.device import Event, dense_vectors, to
from emulated.tape import Tape


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def test_a_replay_computes_anew_from_what_lies_at_the_addresses() -> None:
    given, changed = torch.arange(6).view(2, 3), torch.zeros(2, 3, dtype=torch.int64)
    tape = Tape()
    with tape:
        doubled = given * 2 + 1
        middle = doubled.view(-1)[1:4]
        changed.copy_(doubled)
        changed[0].add_(5)
        picked = given.flatten()[given.flatten() % 2]
    given += 10
    tape.replay()
    assert doubled.tolist() == [[21, 23, 25], [27, 29, 31]]
    assert middle.tolist() == [23, 25, 27]
    assert picked.tolist() == [10, 11] * 3
    assert changed.tolist() == [[26, 28, 30], [27, 29, 31]]


def test_what_the_host_computed_stays_as_it_was() -> None:
    given, factor, tape = torch.ones(2), 2.0, Tape()
    with tape:
        found = given * factor
    factor = 3.0
    tape.replay()
    assert found.tolist() == [2.0, 2.0]


def test_a_kernel_is_launched_at_replays_alone() -> None:
    def kernel(source: torch.Tensor, target: torch.Tensor, *, by: int) -> None:
        target.copy_(source * by)

    source, tape = torch.ones(2), Tape()
    with tape:
        target = torch.empty(2)
        tape.launch(kernel, (source, target), {"by": 3})
    source += 1
    tape.replay()
    assert target.tolist() == [6.0, 6.0]


def test_a_kernel_of_vllms_is_given_no_vector_with_a_stride() -> None:
    def kernel(vector: torch.Tensor, *, table: torch.Tensor) -> None:
        vector += table[0, :3]

    table = torch.ones(3, 8)
    dense_vectors(kernel)(table[1, :3], table=table[:, 2:])
    assert table[1].tolist() == [2.0] * 3 + [1.0] * 5
    with pytest.raises(RuntimeError, match="stride 8"):
        dense_vectors(kernel)(table[:, 0], table=table)


def test_memory_of_a_capture_holds_rubbish_unless_it_is_kept_and_written() -> None:
    given, tape = torch.ones(2), Tape()
    with tape:
        unwritten, kept, passing = torch.empty(2), given + 1, torch.zeros(2)
        address = passing.data_ptr()
        del passing
    assert kept.isnan().all()
    tape.replay()
    assert unwritten.isnan().all()
    assert kept.tolist() == [2.0, 2.0]
    assert all(each == 0xFF for each in (ctypes.c_ubyte * 8).from_address(address))


def test_freed_memory_is_not_read() -> None:
    given, tape = torch.ones(2), Tape()
    with tape:
        found = given + 1
    del given
    with pytest.raises(RuntimeError, match="freed"):
        tape.replay()
    assert len(found) == 2


def test_a_copy_to_the_host_arrives_with_its_event() -> None:
    given, event = torch.ones(2), Event()
    copy = to(given, "cpu", non_blocking=True)
    event.record()
    given += 1
    assert copy.isnan().all()
    event.synchronize()
    assert copy.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x[x > 1],
        lambda x: x.nonzero(),
        lambda x: x.repeat_interleave(x.long()),
    ],
)
def test_what_makes_the_host_wait_cannot_be_captured(wait: Callable[[torch.Tensor], None]) -> None:
    given = torch.arange(3.0)
    wait(given)
    with pytest.raises(RuntimeError, match="cannot be captured"), Tape():
        wait(given)

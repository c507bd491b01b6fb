"""Captured functions of a batch: fixed addresses, padding, and batches that are too large."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from replays import rerun

from dyntree_plugin.engine.cuda.graph_memory import GraphMemory
from dyntree_plugin.engine.cuda.graphs import Input, Replay, RequestGraphs, Tensors, request_sizes

MOST = 8


class Device:
    """A device on which a graph takes ``OWN`` bytes, and 1000 of each request from memory that all
    graphs share."""

    OWN = 7

    def __init__(self) -> None:
        self.shared = self.graphs = 0

    def free(self) -> int:
        return -self.shared - self.OWN * self.graphs

    def record(self, run: Callable[[], Tensors]) -> tuple[Replay, Tensors]:
        values = run()
        self.shared = max(self.shared, 1000 * len(values[0]))
        self.graphs += 1
        return (lambda: None), values


@pytest.mark.parametrize(
    ("sizes", "captured"),
    [
        ([(1, 2, 4, 8)] * 5, 10),
        ([(1, 2, 4, 8), (1, 2), (1,), (1, 2, 4)], 7),
        ([(1,)] * 3, 3),
        ([(1, 2, 4, 8), ()], 2),
    ],
)
def test_the_memory_of_all_graphs_is_estimated_from_two_of_each_stage(
    sizes: list[tuple[int, ...]], captured: int
) -> None:
    stages = [RequestGraphs(lambda each: (each,), [Input(torch.zeros(MOST))], own) for own in sizes]
    few, every = Device(), Device()
    memory = GraphMemory(few.free)
    memory.capture(stages, few.record)
    for graphs in stages:
        graphs.capture(every.record)
    assert few.graphs == captured
    assert few.free() - memory.left_out == every.free()


def weighted(index: torch.Tensor, rows: torch.Tensor) -> Tensors:
    return (torch.where(index < 0, -1.0, index + rows.sum(dim=1)), index * 2)


def captured(sizes: tuple[int, ...] = (1, 2, 4, MOST)) -> RequestGraphs:
    index = Input(torch.zeros(MOST, dtype=torch.int64), padding=-1)
    graphs = RequestGraphs(weighted, [index, Input(torch.zeros(MOST, 3))], sizes)
    graphs.capture(rerun)
    return graphs


def batch(requests: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(requests), torch.randn(requests, 3)


def test_any_number_of_requests_gets_what_the_function_gives() -> None:
    graphs = captured()
    for requests in (3, 1, 8, 5, 2):
        arguments = batch(requests)
        torch.testing.assert_close(graphs(*arguments), weighted(*arguments))


def test_padding_is_written_where_there_is_none_and_never_again() -> None:
    graphs = captured(sizes=(MOST,))
    index = graphs.inputs[0].buffer
    graphs(*batch(2))
    assert index.tolist() == [0, 1, -1, -1, -1, -1, -1, -1]
    index[6:] = -7
    graphs(*batch(6))
    assert index.tolist() == [0, 1, 2, 3, 4, 5, -7, -7]
    graphs(*batch(4))
    assert index.tolist() == [0, 1, 2, 3, -1, -1, -7, -7]


def test_two_functions_of_one_input_find_its_padding() -> None:
    index = Input(torch.zeros(MOST, dtype=torch.int64), padding=-1)
    both = [RequestGraphs(lambda each: (each + 0,), [index], (MOST,)) for _ in range(2)]
    for graphs in both:
        graphs.capture(rerun)
    for graphs, requests in zip([*both, both[0]], (3, 6, 2), strict=True):
        graphs(torch.arange(requests))
        values = graphs._captured[MOST][1][0]
        assert values.tolist() == [*range(requests), *[-1] * (MOST - requests)]


def noting(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note the rows of every copy."""
    copies: list[int] = []
    stock = torch.Tensor.copy_

    def copy(to: torch.Tensor, of: torch.Tensor, **given: bool) -> torch.Tensor:
        copies.append(len(of))
        return stock(to, of, **given)

    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    return copies


@pytest.mark.parametrize("constant", [False, True])
def test_what_stays_as_it_is_reaches_all_functions_of_a_step_in_one_copy(
    constant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: an argument that may have changed is copied for each of them."""
    index = Input(torch.zeros(MOST, dtype=torch.int64), padding=-1, constant=constant)
    both = [RequestGraphs(lambda each: (each + 0,), [index], (MOST,)) for _ in range(2)]
    first, second = torch.arange(3), torch.arange(5, 7)
    for graphs in both:
        graphs.fill((first,))
        graphs.capture(lambda run: (lambda: None, run()))
    copies = noting(monkeypatch)
    for requests in (first, second, first):
        for graphs in both:
            graphs(requests)
        expected = [*requests.tolist(), *[-1] * (MOST - len(requests))]
        assert index.buffer.tolist() == expected
    assert copies == ([3, 2, 3] if constant else [3, 3, 2, 2, 3, 3])


def test_what_was_written_in_place_is_padded_but_not_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index = Input(torch.zeros(MOST, dtype=torch.int64), padding=-1)
    graphs = RequestGraphs(lambda each: (each + 0,), [index], (MOST,))
    graphs.capture(rerun)
    index.buffer[:3] = torch.tensor([4, 5, 6])
    copies = noting(monkeypatch)
    graphs(index.buffer[:3])
    assert index.buffer.tolist() == [4, 5, 6, *[-1] * (MOST - 3)]
    assert copies == [MOST]  # a replay's own, of the value


def test_inputs_and_values_stay_where_they_are() -> None:
    graphs = captured()
    addresses = [each.buffer.data_ptr() for each in graphs.inputs]
    first = graphs(*batch(3))
    second = graphs(*batch(4))
    assert first is not None
    assert second is not None
    assert first[0].data_ptr() == second[0].data_ptr()
    assert [each.buffer.data_ptr() for each in graphs.inputs] == addresses


def test_a_batch_larger_than_all_that_was_captured_is_not_served() -> None:
    graphs = captured(sizes=(1, 2))
    assert graphs(*batch(3)) is None


@pytest.mark.parametrize("most", [1, 3, 100])
def test_sizes_ascend_to_the_most_and_none_is_padded_to_twice_its_own(most: int) -> None:
    sizes = request_sizes(most)
    assert sizes[-1] == most
    assert list(sizes) == sorted(set(sizes))
    for requests in range(1, most + 1):
        assert next(size for size in sizes if size >= requests) < 2 * requests

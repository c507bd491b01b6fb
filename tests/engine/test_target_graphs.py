"""A batch of trees is padded to a graph of its tree size."""

from __future__ import annotations

from dataclasses import dataclass, field

from dyntree_plugin.engine.gpu.target_graphs import offer_larger


@dataclass(frozen=True)
class Graph:
    num_tokens: int
    uniform_token_count: int | None
    num_active_loras: int = 0


@dataclass
class Manager:
    """Offers a batch the graphs of the next larger number of rows, as vLLM's does."""

    _candidates: dict[tuple[int, int], list[Graph]] = field(default_factory=dict)

    def offer(self, graphs: list[Graph]) -> Manager:
        for rows in range(1, max(graph.num_tokens for graph in graphs) + 1):
            following = min(graph.num_tokens for graph in graphs if graph.num_tokens >= rows)
            self._candidates[rows, 0] = [g for g in graphs if g.num_tokens == following]
        return self

    def dispatch(self, rows: int, uniform: int) -> Graph | None:
        offered = self._candidates[rows, 0]
        return next((g for g in offered if g.uniform_token_count in (uniform, None)), None)


PIECEWISE = Graph(32, None)


def test_a_batch_between_graphs_of_another_size_finds_its_own() -> None:
    graphs = [Graph(5 * n, 5) for n in (1, 2, 4, 7, 8)] + [Graph(3 * n, 3) for n in (1, 4, 11)]
    manager = Manager().offer(graphs)
    assert manager.dispatch(30, 5) is None, "the control: vLLM's own offer"
    offer_larger(manager)
    assert manager.dispatch(30, 5) == Graph(35, 5)
    assert manager.dispatch(30, 3) == Graph(33, 3)


def test_the_smallest_that_fits_comes_first_and_piecewise_graphs_last() -> None:
    manager = Manager().offer([Graph(35, 5), Graph(40, 5), Graph(32, 3), PIECEWISE])
    offer_larger(manager)
    assert manager._candidates[30, 0] == [Graph(32, 3), Graph(35, 5), Graph(40, 5), PIECEWISE]


def test_a_batch_is_not_padded_to_more_than_twice_its_rows() -> None:
    manager = Manager().offer([Graph(40, 5), Graph(12, 3)])
    offer_larger(manager)
    assert manager.dispatch(10, 5) is None


def test_with_one_tree_size_vllms_offer_stays() -> None:
    manager = Manager().offer([Graph(35, 5), Graph(40, 5), PIECEWISE])
    before = {key: list(offered) for key, offered in manager._candidates.items()}
    offer_larger(manager)
    assert manager._candidates == before

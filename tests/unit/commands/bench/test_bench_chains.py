"""Which of vLLM's chains a measurement has, and the loads that each of them serves."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from made_up_engines import answered

from dyntree_plugin.commands.bench import arguments, chains, command, plan
from dyntree_plugin.commands.bench.chains import KINDS, chosen, kind_of, serves
from dyntree_plugin.commands.bench.measure import measure
from dyntree_plugin.commands.bench.plan import Models
from dyntree_plugin.commands.bench.results import Cell
from dyntree_plugin.commands.bench.session import Contest, Extras, Grid
from dyntree_plugin.commands.loads.load import Load
from dyntree_plugin.commands.loads.requests import Request
from dyntree_plugin.commands.loads.runs import Engine, Run

COLD, WARM = (Cell(prompts="code", temperature=t, batch=1) for t in (0.0, 1.0))
Asked = tuple[chains.Chains, list[str]]
MODELS = Models("T", "D")


def ask(*temperatures: float, given: Sequence[str] | None = None, **how: bool) -> Asked:
    return chosen(given, temperatures, **how)


def test_all_chains_are_of_every_kind_that_can_be_told_apart() -> None:
    found, notes = ask(0.0, 1.0, given=["all"])
    assert found == {name: kind.lengths for name, kind in KINDS.items()}
    assert any("At temperature 0 drawn drafts are the greedy ones" in note for note in notes)
    assert not [note for note in ask(1.0, given=["all"])[1] if "At temperature 0" in note]


def test_a_first_answer_has_a_short_and_a_long_chain_of_what_may_be_best_and_says_so() -> None:
    found, notes = ask(0.0, 1.0)
    assert [len(lengths) for lengths in found.values()] == [2, 0, 2, 1]
    assert all({*lengths} <= {*KINDS[name].lengths, 3} for name, lengths in found.items())
    assert "A few of vLLM's chains; --chain all measures more kinds and lengths." in notes


def test_without_a_draft_there_are_n_gram_chains_alone() -> None:
    for given in (None, ["all"]):
        found, notes = ask(0.0, 1.0, given=given, draft=False)
        assert {name: lengths for name, lengths in found.items() if lengths} == {
            "n-gram": KINDS["n-gram"].lengths
        }
        assert notes == []
    assert ask(1.0, given=["5", "n-gram:7"], draft=False)[0]["n-gram"] == (5, 7)
    with pytest.raises(ValueError, match="--chain block:4: it drafts with a model, and with"):
        ask(1.0, given=["block:4"], draft=False)


def test_n_gram_chains_are_left_out_where_a_cpu_may_read_a_part_of_a_prompt() -> None:
    found, notes = ask(1.0, pieces=True)
    assert found["n-gram"] == ()
    assert any(note.startswith("Not measured: n-grams (above temperature 0") for note in notes)
    assert ask(0.0, pieces=True)[0]["n-gram"]
    with pytest.raises(ValueError, match="--chain n-gram:4: above temperature 0 the runner"):
        ask(0.0, 1.0, given=["n-gram:4"], pieces=True)


def test_at_temperature_0_alone_no_drawn_chain_is_measured() -> None:
    found, notes = ask(0.0, given=["all"])
    assert [name for name, lengths in found.items() if lengths] == ["greedy", "n-gram"]
    assert len(notes) == 2
    assert all(note.startswith("Not measured: ") for note in notes)


def test_the_chains_that_are_given_are_measured_and_no_others() -> None:
    found, notes = ask(1.0, given=["7", "7", "block:5", "greedy:3", "n-gram:8"])
    assert found == {"greedy": (7, 3), "probabilistic": (), "block": (5,), "n-gram": (8,)}
    assert notes == []
    assert not any(ask(0.0, given=["0"])[0].values())


def all_kinds() -> list[Engine]:
    lengths = dict.fromkeys(KINDS, (4,))
    return plan.engines(MODELS, [COLD, WARM], 9, chains=lengths, trees={"tree": (8, {})})


def test_a_chains_kind_is_read_from_its_arguments() -> None:
    of_chains = [engine for engine in all_kinds() if engine.kind == "chain"]
    assert [kind_of(engine) for engine in of_chains] == list(KINDS)
    assert [engine.name for engine in of_chains] == [f"{kind.name} of 4" for kind in KINDS.values()]
    assert kind_of(Engine(name="c", kind="chain", budget=1, arguments={})) == "greedy"


class Server:
    def __init__(self, log: list[tuple[str, float]], name: str) -> None:
        self.log, self.name = log, name

    def serve(self, load: Load) -> tuple[Run, list[list[int]]]:
        self.log.append((self.name, load.temperature))
        return answered(load)


@pytest.mark.parametrize("by_cell", [True, False])
def test_drawn_chains_are_measured_and_warmed_up_above_temperature_0_alone(by_cell: bool) -> None:
    served: list[tuple[str, float]] = []
    warmed: dict[str, set[float]] = {}

    @contextmanager
    def opened(engine: Engine, warm_up: list[Load]) -> Iterator[Any]:
        warmed[engine.name] = {load.temperature for load in warm_up}
        yield Server(served, engine.name)

    engines = all_kinds()
    loads = {cell: Load([Request([1])], 1, cell.temperature, 8) for cell in (COLD, WARM)}
    *_, found = measure(engines, loads, 1, opened, by_cell=by_cell)
    drawn = {"probabilistic chain of 4", "block chain of 4"}
    for engine in engines:
        wanted = {1.0} if engine.name in drawn else {0.0, 1.0}
        assert {temperature for name, temperature in served if name == engine.name} == wanted
        assert warmed[engine.name] == wanted
    assert len(found) == len(served) == 2 * len(engines) - 2
    assert {s.engine for s in found if s.cell == COLD} == {e.name for e in engines} - drawn


def test_the_runs_of_a_contest_are_those_that_are_served() -> None:
    lengths = {"greedy": (1, 2), "probabilistic": (5, 6), "block": (7,), "n-gram": (3,)}
    contest = Contest(MODELS, lengths, {"tree": (8, {})}, Extras(look_ups=(4,)))
    assert sorted(engine.budget for engine in contest.own) == list(range(9))
    grid = Grid(["code"], [0.0, 1.0], [1, 4], 1, 8, rounds=3, seed=0)
    cells = list(grid.loads({"code": [Request([1])] * 4}))
    engines = plan.engines(MODELS, cells, 9, chains=lengths, trees=contest.trees, look_ups=(4,))
    served = [(e, c) for e in engines for c in cells if serves(e, c.temperature)]
    assert grid.runs(contest.engines) == 3 * len(served)


def counted(*given: str, rounds: int) -> tuple[Contest, Grid, int]:
    """Return a contest with these chains on the default loads, and how often engines start on a
    GPU, which holds one: as every other round goes backwards, the last of a round stays."""
    lengths, _ = ask(*arguments.TEMPERATURES, given=given or None)
    of_trees = plan.named_trees(arguments.TREES, arguments.NODES)
    contest = Contest(MODELS, lengths, of_trees)
    cells = ["code"], arguments.TEMPERATURES, arguments.BATCHES
    grid = Grid(*cells, DEFAULTS["count"], DEFAULTS["max_tokens"], rounds)
    return contest, grid, 1 + rounds * (len(contest.own) - 1)


DEFAULTS = {
    name: each.default for name, each in inspect.signature(command.serve).parameters.items()
}


def test_the_help_and_the_page_count_the_runs_and_starts_of_the_defaults() -> None:
    contest, grid, starts = counted(rounds=DEFAULTS["rounds"])
    runs, cold, warm = grid.runs(contest.engines), contest.engines(0), contest.engines(1)
    # Each temperature has half of the runs, each batch size, too.
    steps = sum(runs // 2 * grid.prompts * grid.max_tokens // b for b in grid.batches)
    more, of_more, starts_of_more = counted("all", rounds=3)
    runs_of_more = of_more.runs(more.engines)
    fewer, of_fewer, _ = counted("5", rounds=1)
    shown = " ".join((inspect.getdoc(command.serve) or "").split())
    page = " ".join((Path(__file__).parents[4] / "docs" / "options.md").read_text().split())
    loads = f"{grid.prompts} prompts with {grid.max_tokens} tokens"
    for text in (
        f"{runs} runs of {loads}",
        f"in each of {grid.rounds} rounds, with 2 batch sizes, "
        f"{cold} engines at temperature 0 and {warm} at 1",
        f"{warm}, or {starts} on a GPU",
        f"{runs_of_more} runs of {more.engines(1)} engines",
        f"{of_fewer.runs(fewer.engines)} runs of {fewer.engines(1)} engines",
    ):
        assert text in shown
    for text in (
        f"{grid.rounds} × 1 × 2 × ({cold} at temperature 0 + {warm} at 1",
        f"= {runs} runs of {loads}",
        f"{warm} times if all fit into a CPU's memory, {starts} times on a GPU",
        f"{runs_of_more} runs of {more.engines(1)} engines",
        f"{starts_of_more} times on a GPU",
    ):
        assert text in page
    for text in (shown, page):
        assert f"about {round(steps, -3):,} times the target's time per token" in text

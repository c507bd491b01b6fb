"""Results of an earlier call on a GPU that are not measured again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import gpu_results
import pytest
import torch

from dyntree_plugin.commands.bench.results import Cell, Result, Series, write
from dyntree_plugin.commands.loads.runs import Engine, Run
from dyntree_plugin.provenance import provenance

ENGINES = [
    Engine(name=name, kind="chain", budget=2, arguments={}) for name in ("chain of 2", "chain of 3")
]
CELLS = [Cell(prompts="code", temperature=0.0, batch=batch) for batch in (1, 8)]
ROUNDS = 3


def result(lacking: int = 0, cells: int = 2) -> Result:
    """Return a result with ``cells`` cells; the last series lacks ``lacking`` of its rounds."""
    made = [
        Run(round=n, requests=1, seconds=1.0, output_tokens=1, tpot_ms=1.0, ttft_ms=1.0)
        for n in range(ROUNDS)
    ]
    series = [
        Series(engine=engine.name, cell=cell, runs=made)
        for cell in CELLS[:cells]
        for engine in ENGINES
    ]
    series[-1] = series[-1].model_copy(update={"runs": made[lacking:]})
    loads = {"sets": ["code"], "temperatures": [0.0], "batches": [1, 8], "rounds": ROUNDS}
    return Result(provenance=provenance(), settings=loads, notes=[], engines=ENGINES, series=series)


def test_a_measurement_stands_that_lacks_nothing(tmp_path: Path) -> None:
    write(result(), tmp_path / "result.json")
    assert gpu_results.whole(tmp_path / "result.json")


def test_chains_with_drawn_drafts_lack_no_load_at_temperature_0(tmp_path: Path) -> None:
    own = {"speculative_config": {"draft_sample_method": "probabilistic"}}
    drawn = Engine(name="probabilistic chain of 2", kind="chain", budget=2, arguments=own)
    made = result().model_copy(update={"engines": [*ENGINES, drawn]})
    write(made, tmp_path / "result.json")
    assert gpu_results.whole(tmp_path / "result.json")


def test_what_a_full_installation_has_is_looked_for_whatever_its_packages_raise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "raising").mkdir()
    (tmp_path / "raising" / "__init__.py").write_text("raise ImportError('no extension is there')")
    monkeypatch.syspath_prepend(str(tmp_path))
    parts = {"that raises": "raising.part", "that is nowhere": "nowhere.part", "json": "json.tool"}
    monkeypatch.setattr(gpu_results, "PARTS", parts)
    assert [*gpu_results.missing()] == ["that raises", "that is nowhere"]


@pytest.mark.parametrize("made", [result(lacking=1), result(cells=1)], ids=["round", "load"])
def test_one_that_broke_off_does_not(made: Result, tmp_path: Path) -> None:
    write(made, tmp_path / "result.json")
    assert not gpu_results.whole(tmp_path / "result.json")
    assert not gpu_results.whole(tmp_path / "none.json")


@pytest.mark.parametrize("what", ["commit", "gpu", "packages"])
def test_nor_does_one_of_other_code_or_another_machine(what: str, tmp_path: Path) -> None:
    made = result()
    other = made.model_copy(update={"provenance": made.provenance | {what: "another"}})
    write(other, tmp_path / "result.json")
    assert not gpu_results.whole(tmp_path / "result.json")


def test_four_lines_say_what_the_machine_is_and_none_that_it_has_no_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not [*gpu_results.machine()]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    properties = SimpleNamespace(total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    told = []
    for commit in ("one", "one", "two"):
        known = provenance() | {"commit": commit}
        monkeypatch.setattr(gpu_results, "provenance", lambda known=known: known)
        told.append([*gpu_results.machine()])
    assert told[0][:2] == ["h100-80gb-hbm3", "80"]
    assert told[0] == told[1] != told[2]
    assert not any("\n" in line for line in told[0])
    assert len(told[0]) == 4

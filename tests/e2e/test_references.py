"""Engines without trees of every kind of small target give right scores, before trees are compared
with them.

In `make test`, the engines that other tests start are checked as here (`serve_right`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import images
import latent_targets
import pytest
import random_targets
import references
import torch
import vision_targets
import workload
from engine_process import Output, Result, Run
from latent_targets import latent_target
from random_engines import FLOAT32_DELTA_NET, LATENT_ON_CPU
from random_targets import random_target
from references import ANSWER
from vision_targets import vision_target

Make = Callable[[Path, str], Path]
RECURRENT = random_targets.RECURRENT
WRITTEN: dict[str, Make] = {
    **dict.fromkeys(
        [*RECURRENT, *random_targets.WINDOWED, *random_targets.MIXTURES], random_target
    ),
    **dict.fromkeys(latent_targets.CONFIGS, latent_target),
    **dict.fromkeys(vision_targets.CONFIGS, vision_target),
}
KINDS = [kind for kind in WRITTEN if kind not in references.WITHOUT_TRANSFORMERS]


def _engine(model: Path, kind: str) -> dict[str, Any]:
    make, delta_net = WRITTEN[kind], kind.startswith(("qwen3_next", "qwen3_5", "intern"))
    return {
        **workload.without_tree(model=str(model)),
        **(FLOAT32_DELTA_NET if delta_net else {}),
        **(LATENT_ON_CPU if make is latent_target else {}),
        **(images.OPTIONS if make is vision_target else {}),
        # vLLM's operator of Mamba-2 for CPUs keeps no states for a prefix cache.
        **({"enable_prefix_caching": False} if delta_net or kind in RECURRENT else {}),
    }


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_transformers_alone_as_in_a_batch(kind: str, tmp_path: Path) -> None:
    engine = _engine(WRITTEN[kind](tmp_path / kind, kind), kind)
    assert references.serve_right(engine, {}) == {}


class _Greedy:
    """Serves as an engine whose scores are those of transformers, but for ``wrong``: by the name of
    a run, what is added to the scores of answers."""

    def __init__(self, model: Path) -> None:
        self.model, self.wrong = references.load(model), dict[str, float]()
        self._output = cache(self._answer)

    def __call__(self, engine: Mapping[str, Any], runs: Mapping[str, Run]) -> Mapping[str, Result]:
        return {
            name: Result(self._outputs(name, run), {}, [], [], [], "") for name, run in runs.items()
        }

    def _outputs(self, name: str, run: Run) -> list[Output | None]:
        found = [self._output(tuple(request.prompt)) for request in run.requests]
        by = self.wrong.get(name, 0.0)
        return [
            replace(each, logprobs=[[[score + by] for (score,) in each.logprobs[0]]])
            for each in found
        ]

    @torch.inference_mode()
    def _answer(self, prompt: tuple[int, ...]) -> Output:
        tokens, read = [*prompt], len(prompt)
        for _ in range(ANSWER):
            logits = self.model(torch.tensor([tokens])).logits[0]
            tokens.append(int(logits[-1].argmax()))
        scores = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None]).tolist()
        return Output([*prompt], [tokens[read:]], [""], [None], [scores[read - 1 :]],
                      [score for (score,) in scores[: read - 1]], 0)  # fmt: skip


def test_wrong_scores_are_found(tmp_path: Path) -> None:
    model = random_target(tmp_path / "target", "mistral", num_hidden_layers=1)
    engine, greedy = {"model": str(model)}, _Greedy(model)
    references.serve_right(engine, {}, greedy)
    greedy.wrong = {references.ALONE: 0.5}
    with pytest.raises(AssertionError, match="alone and in a batch are 0"):
        references.serve_right(engine, {}, greedy)
    greedy.wrong = dict.fromkeys(references.RUNS, 0.5)
    with pytest.raises(AssertionError, match=r"are 0\.\d+ from those of transformers"):
        references.serve_right(engine, {}, greedy)
    references.serve_right(engine, {}, greedy, of_transformers=False)

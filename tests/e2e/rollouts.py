"""An engine whose weights are replaced while requests run, by vLLM's own calls.

As a program, this takes the files of a job and of its results, as engine_process.py does.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import sleeping
from engine_process import Engine, Request, answered, read_metrics, sampling_params
from steady_costs import STEADY_COSTS, assumed_if

BACKEND = "files"
"""The name of `Files` in a configuration of vLLM's weight transfer."""


@dataclass(frozen=True)
class Update:
    """Replaces the target's weights by those in ``folder``.

    With ``reload``, vLLM's ``reload_weights`` does it, else its weight transfer. With ``sleep``,
    the engine first keeps its requests and sleeps at this level.
    """

    folder: str
    reload: bool = False
    sleep: int = 0


@dataclass(frozen=True)
class Rollout:
    """Requests that run together, and ``updates`` by the engine step after which they come.

    With ``at``, the requests run one after another: each gets the updates when it has as many
    tokens as ``at`` says for them, and before its first token those of step 0. ``broken`` names a
    function of sleeping.py that is in force.
    """

    requests: list[Request]
    updates: dict[int, list[Update]] = field(default_factory=dict)
    at: list[dict[int, int]] | None = None
    broken: str | None = None


@dataclass(frozen=True)
class Text:
    """A request's ``tokens``; ``at``: how many it had at each update, by the update's step."""

    tokens: list[int]
    at: dict[int, int]


@dataclass(frozen=True)
class Rolled:
    """The ``texts`` by request, and the increase of metrics.

    ``values`` holds how far the weights that value nodes were from those of a new engine before and
    after each update.
    """

    texts: list[Text]
    metrics: dict[str, float]
    values: list[tuple[float, float]]


def roll(engine: Mapping[str, Any], runs: Mapping[str, Rollout]) -> dict[str, Rolled]:
    """Start an engine, and work through the runs in order."""
    arguments = engine | {"weight_transfer_config": {"backend": BACKEND}}
    found = answered(__file__, arguments, runs, threads=1)
    return {
        name: Rolled([_text(each) for each in r.pop("texts")], **r) for name, r in found.items()
    }


class Trainer(Engine):
    """An engine whose weights are replaced as a trainer does it."""

    def roll(self, run: Rollout) -> Rolled:
        before, self._values = read_metrics(), list[tuple[float, float]]()
        with getattr(sleeping, run.broken)(self.runner) if run.broken else nullcontext():
            texts = self._texts(run)
        gained = {name: value - before.get(name, 0.0) for name, value in read_metrics().items()}
        return Rolled(texts, gained, self._values)

    def _texts(self, run: Rollout) -> list[Text]:
        if run.at is None:
            return self._until_ended(run.requests, run.updates, None)
        texts = []
        for request, at in zip(run.requests, run.at, strict=True):
            self._update(run.updates.get(0, []))
            by_length = {at[step]: found for step, found in run.updates.items() if step}
            texts += self._until_ended([request], {}, by_length)
        return texts

    def _until_ended(
        self,
        requests: Sequence[Request],
        by_step: Mapping[int, list[Update]],
        by_length: Mapping[int, list[Update]] | None,
    ) -> list[Text]:
        engine, names, texts = self.llm.llm_engine, list[str](), dict[str, list[int]]()
        self.llm.reset_prefix_cache()
        for request in requests:
            name, self._begun = str(self._begun), self._begun + 1
            names.append(name)
            engine.add_request(name, {"prompt_token_ids": self._prompt(request)},
                               _streamed(request.params))  # fmt: skip
            texts[name] = []
        at: list[dict[int, int]] = [{} for _ in names]
        self._update(by_step.get(0, []))
        step = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                texts[output.request_id] += output.outputs[0].token_ids
            step += 1
            due = by_step if by_length is None else by_length
            reached = step if by_length is None else len(texts[names[0]])
            if found := due.get(reached):
                for request, name in zip(at, names, strict=True):
                    request[reached] = len(texts[name])
                self._update(found)
        return [Text(texts[name], each) for name, each in zip(names, at, strict=True)]

    def _update(self, updates: Sequence[Update]) -> None:
        for each in updates:
            before = sleeping.learned(self.runner)
            if each.sleep:
                self.llm.sleep(each.sleep, mode="keep")
                self.llm.wake_up(["weights"])
            self._replace(each)
            if each.sleep:
                self.llm.wake_up(["kv_cache"])
            self._values.append((before, sleeping.learned(self.runner)))

    def _replace(self, update: Update) -> None:
        if update.reload:
            self.llm.collective_rpc("reload_weights", kwargs={"weights_path": update.folder})
            return
        self.llm.collective_rpc("start_weight_update")
        info = {"folder": update.folder}
        self.llm.collective_rpc("update_weights", kwargs={"update_info": info})
        self.llm.collective_rpc("finish_weight_update")


def _streamed(params: Mapping[str, Any]) -> Any:
    from vllm.sampling_params import RequestOutputKind

    found = sampling_params(params)
    found.output_kind = RequestOutputKind.DELTA
    return found


def _text(value: dict[str, Any]) -> Text:
    return Text(value["tokens"], {int(step): length for step, length in value["at"].items()})


def _register() -> None:
    """Let vLLM know a weight transfer that reads a model's files."""
    from safetensors.torch import load_file
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.reload.layerwise import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    @dataclass
    class Folder(WeightTransferUpdateInfo):
        folder: str

    class Files(WeightTransferEngine[WeightTransferInitInfo, Folder]):
        init_info_cls, update_info_cls = WeightTransferInitInfo, Folder

        def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None: ...

        def start_weight_update(self) -> None:
            initialize_layerwise_reload(self.model)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: Folder) -> None:
            stored = load_file(Path(update_info.folder, "model.safetensors"))
            self.model.load_weights(iter(stored.items()))

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None: ...

    WeightTransferEngineFactory.register_engine(BACKEND, Files)


def _rollout(value: dict[str, Any]) -> Rollout:
    requests = [Request(**each) for each in value.pop("requests")]
    updates = {
        int(step): [Update(**each) for each in found]
        for step, found in value.pop("updates").items()
    }
    at = value.pop("at")
    if at is not None:
        at = [{int(step): length for step, length in each.items()} for each in at]
    return Rollout(requests, updates, at, **value)


def main(job_path: str, results_path: str) -> None:
    _register()
    job = json.loads(Path(job_path).read_text())
    results = {}
    with assumed_if(job["engine"].pop(STEADY_COSTS, False)), sleeping.as_on_cuda():
        engine = Trainer(job["engine"])
        for name, value in job["runs"].items():
            results[name] = asdict(engine.roll(_rollout(value)))
    Path(results_path).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])

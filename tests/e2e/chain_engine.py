"""An engine with vLLM's own chain of an EAGLE head on the CPU, whose drafts are noted. It runs as
a program, as engine_process.py does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import compilations
from engine_process import Engine, Result, Run, answered, main, result_of

Drafts = list[tuple[list[int], list[int]]]
"""Every context that was drafted for, its last token included, with the drafts."""


@dataclass(frozen=True)
class Chained:
    """A run's result, its drafts, and the kernels that were compiled during it."""

    result: Result
    drafts: Drafts
    compiled: list[str]


def serve_chain(engine: Mapping[str, Any], runs: Mapping[str, Run]) -> dict[str, Chained]:
    """Start an engine without trees that has a `speculator`, and work through the runs."""
    found = answered(__file__, engine, runs, threads=1, afresh=True)
    return {
        name: Chained(result_of(one["result"]), one["drafts"], one["compiled"])
        for name, one in found.items()
    }


@contextmanager
def noting(runner: Any, drafts: Drafts) -> Iterator[None]:
    """Note what the speculator proposes, unless the step ends within a prompt."""
    stock = runner.speculator.propose

    def propose(batch: Any, *given: Any, **named: Any) -> Any:
        found = stock(batch, *given, **named)
        num_sampled, num_rejected, last_sampled = given[4:7]
        states = runner.req_states
        for row, slot in enumerate(batch.idx_mapping.tolist()):
            if num_sampled[row] > 0:
                length = int(batch.seq_lens[row] - num_rejected[row])
                context = states.all_token_ids.gpu[slot, :length].tolist()
                drafts.append(([*context, int(last_sampled[slot])], found[row].tolist()))
        return found

    with mock.patch.object(runner.speculator, "propose", propose):
        yield


@contextmanager
def shifted_hidden_states(runner: Any) -> Iterator[None]:
    """Give the head the hidden state of the position before."""
    stock = runner.speculator.model.combine_hidden_states

    def combine(hidden_states: Any) -> Any:
        return stock(hidden_states.roll(1, 0))

    with mock.patch.object(runner.speculator.model, "combine_hidden_states", combine):
        yield


@contextmanager
def standing_still(runner: Any) -> Iterator[None]:
    """Let the further drafts of a chain have the position of the first."""
    from vllm_cpu_runner import target_dependent

    stock = target_dependent._decode

    def decode(*given: Any) -> None:
        *others, _advance = given
        stock(*others, False)

    with mock.patch.object(target_dependent, "_decode", decode):
        yield


@contextmanager
def forgotten_laws(runner: Any) -> Iterator[None]:
    """Verify drafts as if the head had found every token equally likely."""
    stock = runner.speculator.propose

    def propose(*given: Any, **named: Any) -> Any:
        found = stock(*given, **named)
        runner.speculator.draft_logits.zero_()
        return found

    with mock.patch.object(runner.speculator, "propose", propose):
        yield


class ChainEngine(Engine):
    def sabotaged(self, name: str) -> AbstractContextManager[None]:
        broken: AbstractContextManager[None] = globals()[name](self.runner)
        return broken

    def chain(self, run: Run) -> Chained:
        drafts: Drafts = []
        before = compilations.versions()
        with noting(self.runner, drafts):
            result = self.work(run)
        return Chained(result, drafts, compilations.since(before))


if __name__ == "__main__":
    main(ChainEngine, ChainEngine.chain)

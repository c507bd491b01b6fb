"""Compare random requests on random engines with trees against the engine without trees.

As a program: ``python fuzz.py --cases 10000 --seed 1``. A case is a schedule of one to six
requests. Every failing case is written to a file that ``--replay`` takes.

Three things are left out: sampling without a seed, because no two engines share it; sampling under
the papers' rules, which draw other samples by design; and sizes that are refused.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import comparison
import workload
from fuzz_cases import MAX_MODEL_LEN, Schedule, schedule_of, schedules
from fuzz_engine import Answer, EngineFailed, EngineProcess
from fuzz_options import KINDS, Options, engine_options, options_of_kind, plain_of_kind
from hypothesis import HealthCheck, Phase, given, seed, settings
from random_engines import FEW

SMALLER_SECONDS = 90
"""Most seconds for shrinking a failing case."""


@dataclass
class Tally:
    """The number of compared ``cases`` without a difference; their requests, tokens and logprobs;
    and their ``ends`` by finish reason."""

    cases: int = 0
    requests: int = 0
    tokens: int = 0
    logprobs: int = 0
    ends: Counter[str] = field(default_factory=Counter)


def difference(answer: Answer, plain: Answer, aborted: bool) -> str:
    """Describe how an answer differs from that of the engine without trees; empty if it does
    not."""
    if (answer.refused is None) != (plain.refused is None):
        return f"refused: {answer.refused!r} != {plain.refused!r}"
    if answer.output is None or plain.output is None:
        return "" if aborted or answer.refused else "no answer"
    return comparison.difference(answer.output, plain.output, aborted)


def differences(schedule: Schedule, answers: Sequence[Answer], plain: Sequence[Answer]) -> str:
    """Describe the requests whose answers differ, a line for each."""
    pairs = zip(schedule.arrivals, answers, plain, strict=True)
    found = [difference(own, other, each.abort is not None) for each, own, other in pairs]
    return "\n".join(f"request {number}: {text}" for number, text in enumerate(found) if text)


class Differs(AssertionError):
    """A case whose answer differs from the answer without trees."""


class Comparison:
    """An engine with trees and the engine without trees, which get the same requests."""

    def __init__(self, options: Options, plain: Plain, tally: Tally) -> None:
        self._options = options
        self._plain = plain
        self._tally = tally
        self._engine = EngineProcess(options.arguments)
        self._failed_at: float | None = None
        self.failures: list[tuple[Schedule, str]] = []

    def check(self, schedule: Schedule) -> None:
        """Raise `Differs` if answers differ. Do nothing once the time for shrinking is over."""
        if self._failed_at is not None and time.monotonic() - self._failed_at > SMALLER_SECONDS:
            return
        if self._options.greedy:
            schedule = _greedily(schedule)
        if self._options.few_tokens:
            schedule = _of_few_tokens(schedule)
        if found := self._differences(schedule):
            self.failures.append((schedule, found))
            self._failed_at = self._failed_at or time.monotonic()
            raise Differs(found)

    def _differences(self, schedule: Schedule) -> str:
        wanted = self._plain.answers(schedule)
        try:
            if self._engine.closed:
                self._engine = EngineProcess(self._options.arguments)
            answers = self._engine.answers(schedule)
        except EngineFailed as error:
            return f"the engine failed:\n{error}"
        if found := differences(schedule, answers, wanted):
            return found
        self._count(answers)
        return ""

    def _count(self, answers: Sequence[Answer]) -> None:
        self._tally.cases += 1
        for answer in answers:
            self._tally.requests += 1
            if answer.output is None:
                self._tally.ends["refused" if answer.refused else "aborted"] += 1
                continue
            self._tally.ends.update(str(reason) for reason in answer.output.reasons)
            self._tally.tokens += sum(map(len, answer.output.tokens))
            self._tally.logprobs += sum(map(len, answer.output.logprobs))

    def metrics(self) -> dict[str, float]:
        return self._engine.metrics()

    def close(self) -> None:
        self._engine.close()


def _greedily(schedule: Schedule) -> Schedule:
    """Return the same schedule without sampling."""
    keep = [{**each.params, "temperature": 0.0} for each in schedule.arrivals]
    for params in keep:
        params.pop("n", None)
    return replace(
        schedule,
        arrivals=[replace(each, params=p) for each, p in zip(schedule.arrivals, keep, strict=True)],
    )


def _of_few_tokens(schedule: Schedule) -> Schedule:
    """Return the same schedule, whose requests without a grammar answer in few tokens."""

    def params(own: Mapping[str, Any]) -> Mapping[str, Any]:
        return own if "structured_outputs" in own else {**own, **FEW}

    arrivals = [replace(each, params=params(each.params)) for each in schedule.arrivals]
    return replace(schedule, arrivals=arrivals)


class Plain:
    """The engine without trees, the reference for engines of all sizes. It aborts nothing."""

    def __init__(self, **arguments: Any) -> None:
        sizes = {"max_model_len": MAX_MODEL_LEN}
        self._engine = EngineProcess(workload.without_tree(**sizes, **arguments))

    def answers(self, schedule: Schedule) -> list[Answer]:
        # A request that follows an aborted one continues its prompt, as with trees.
        arrivals = [replace(each, abort=each.abort and 1 << 30) for each in schedule.arrivals]
        return self._engine.answers(Schedule(arrivals))

    def close(self) -> None:
        self._engine.close()


@contextmanager
def plain_engine(**arguments: Any) -> Iterator[Plain]:
    engine = Plain(**arguments)
    try:
        yield engine
    finally:
        engine.close()


def fuzz(
    options: Options, plain: Plain, cases: int, number: int, tally: Tally
) -> tuple[Schedule, str] | dict[str, float]:
    """Return the engine's metrics, or the smallest failing case and its difference."""
    try:
        comparison = Comparison(options, plain, tally)
    except EngineFailed as error:
        return Schedule([]), f"the engine does not start:\n{error}"

    @seed(number)
    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
    )
    @given(schedules(options.block_size))
    def each(schedule: Schedule) -> None:
        comparison.check(schedule)

    try:
        try:
            each()
        except BaseException as error:
            # If a case fails only sometimes, hypothesis raises an error about flakiness. Ignore it.
            if not comparison.failures or isinstance(error, KeyboardInterrupt):
                raise
        if comparison.failures:
            return min(comparison.failures, key=lambda f: len(json.dumps(f[0].as_json())))
        return comparison.metrics()
    finally:
        comparison.close()


def report(options: Options, number: int, schedule: Schedule, found: str) -> str:
    """Return a failing case as JSON, with all that `replay` needs."""
    case = {
        "seed": number,
        "engine": dict(options.arguments),
        "plain": options.plain,
        "greedy": options.greedy,
        "few_tokens": options.few_tokens,
        **schedule.as_json(),
        "found": found,
    }
    arrivals = ",\n  ".join(map(json.dumps, case.pop("arrivals")))
    others = ",\n ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in case.items())
    return f'{{"arrivals": [\n  {arrivals}],\n {others}}}\n'


def replay(path: Path) -> str:
    """Run a reported case again, and describe the difference."""
    case = json.loads(path.read_text())
    options = Options(case["engine"], case["plain"], case["greedy"], case["few_tokens"])
    with plain_engine(**options.plain) as plain:
        comparison = Comparison(options, plain, Tally())
        try:
            comparison.check(schedule_of(case))
        except Differs as error:
            return str(error)
        finally:
            comparison.close()
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz engines with trees.")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--each", type=int, default=250, help="number of cases per engine")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first engine")
    parser.add_argument("--growth", nargs="*", help="growths of the engines in turn; default: any")
    parser.add_argument(
        "--own-rule", action="store_true", help="use the growths' own rules, without sampling"
    )
    parser.add_argument(
        "--engine", type=json.loads, default={}, help="arguments of every engine with trees"
    )
    parser.add_argument(
        "--plain", type=json.loads, default={}, help="arguments of the engine without trees"
    )
    parser.add_argument(
        "--kind", choices=KINDS, help="type of a random target; default: the pair's"
    )
    parser.add_argument("--failures", type=Path, default=Path("fuzz-failures"))
    parser.add_argument("--replay", type=Path, help="file of a reported case to run again")
    arguments = parser.parse_args()
    if arguments.kind and (arguments.growth or arguments.own_rule):
        parser.error("--kind has growth topk: leave out --growth and --own-rule")
    if arguments.replay is not None:
        found = replay(arguments.replay)
        print(found or "no difference")
        return bool(found)
    with TemporaryDirectory() as folder:
        model = KINDS[arguments.kind](Path(folder)) if arguments.kind else None
        return _fuzz_all(arguments, model)


def _fuzz_all(arguments: argparse.Namespace, model: Path | None) -> int:
    """Compare all cases, on the random target ``model`` if there is one."""
    failed, tally, began = 0, Tally(), time.monotonic()
    of_kind = {} if model is None else plain_of_kind(model, arguments.kind)
    with plain_engine(**of_kind | arguments.plain) as plain:
        for at in range(math.ceil(arguments.cases / arguments.each)):
            number = arguments.seed + at
            cases = min(arguments.each, arguments.cases - at * arguments.each)
            growths = arguments.growth or [None]
            options = engine_options(number, growths[at % len(growths)], arguments.own_rule)
            if model is not None:
                options = options_of_kind(number, model, arguments.kind)
            options = replace(options, arguments={**options.arguments, **arguments.engine})
            result = fuzz(options, plain, cases, number, tally)
            seconds = time.monotonic() - began
            if isinstance(result, tuple):
                failed += 1
                arguments.failures.mkdir(exist_ok=True)
                path = arguments.failures / f"{number}.json"
                path.write_text(text := report(options, number, *result))
                print(
                    f"engine {number}: DIFFERS, written to {path}\n{text}\n{result[1]}", flush=True
                )
            else:
                preempted = result.get("vllm:num_preemptions_total", 0)
                accepted = result.get("vllm:spec_decode_num_accepted_tokens_total", 0)
                print(
                    f"engine {number}: {cases} cases agree, {accepted:.0f} tokens accepted, "
                    f"{preempted:.0f} preemptions; {seconds:.0f} s",
                    flush=True,
                )
    print(f"{tally}; {failed} engines differ")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())

"""Every method at every budget and temperature, on the same prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.acceptance.calibrate import (
    learn_values,
    look_ups,
    positional_acceptance,
)
from benchmarks.acceptance.drafting import Pick
from benchmarks.acceptance.methods import Method, Setting
from benchmarks.acceptance.posterior import fitted_beta, measure
from benchmarks.acceptance.simulate import Counts, simulate
from benchmarks.acceptance.texts import Prompts, write
from benchmarks.acceptance.verifying import Blocks, Replay, Verifier, Walk
from benchmarks.acceptance.workloads import Texts
from dyntree_plugin.tree.children import ChildPicker, Children, DraftRows
from dyntree_plugin.tree.judged import Asked
from dyntree_plugin.tree.perturb import perturb_on
from dyntree_plugin.tree.plan import TreePlan
from dyntree_plugin.tree.registry import DRAWN_RULES
from dyntree_plugin.tree.value import AcceptanceEstimate
from dyntree_plugin.tune.posterior import Posterior

LEARNING_BUDGET = 64
_LEARNING = ("calibrated", "with_look_up", "pool", "pool_with_look_up", "look_up")
_NODES_AT_ONCE = 50_000
"""Nodes of the trees of a batch of prompts, which take up to 2 GiB."""

_MOST_WORKERS = 4

Report = Callable[[str], None]


@dataclass(frozen=True)
class Pair:
    """The models compared, and the tokenizer of all. Only pools have all of ``drafts``."""

    target: PreTrainedModel
    drafts: Sequence[PreTrainedModel]
    tokenizer: PreTrainedTokenizerBase

    @property
    def draft(self) -> PreTrainedModel:
        """The first draft."""
        return self.drafts[0]

    def prompts(self, texts: list[str], seed: int) -> Prompts:
        """
        Raises:
            ValueError: for a prompt of no tokens.
        """
        ids = [self.tokenizer(text)["input_ids"] for text in texts]
        for text, prompt in zip(texts, ids, strict=True):
            if not prompt:
                raise ValueError(f"prompt {text!r} has no tokens")
        return Prompts.of(ids, seed, self.target.device)

    def continuations(self, texts: list[str], count: int) -> torch.Tensor:
        """Return the first ``count`` tokens of every text, int64 [R, count].

        Raises:
            ValueError: for a text with fewer tokens.
        """
        ids = [self.tokenizer(text)["input_ids"][:count] for text in texts]
        if min(map(len, ids)) < count:
            raise ValueError(
                f"a text of the workload has {min(map(len, ids))} tokens, but --max-tokens and "
                f"--max-depth together need {count}"
            )
        return torch.tensor(ids, device=self.target.device)


@dataclass(frozen=True)
class Trial:
    """What is tried. ``tokens``: of each prompt's continuation. ``calibration``: prompts that only
    Sequoia's P, the values and the posterior's beta are measured on."""

    prompts: Texts
    calibration: Texts
    methods: list[Method]
    budgets: list[int]
    temperatures: list[float]
    tokens: int
    max_depth: int
    seed: int


@dataclass
class Lesson:
    """What the calibration prompts told of one temperature."""

    acceptance: tuple[float, ...] = ()
    beta: float = 1.0
    values: dict[str, AcceptanceEstimate] = field(default_factory=dict)


@dataclass
class Cell:
    """One method at one budget and temperature."""

    method: Method
    setting: Setting
    plan: TreePlan
    counts: Counts
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        c = self.counts
        return {
            "method": self.method.name,
            "label": self.method.label,
            "ours": self.method.ours,
            "budget": self.setting.budget,
            "temperature": self.setting.temperature,
            "steps": c.steps,
            "tokens": c.tokens,
            "tokens_per_step": c.tokens / c.steps,
            "expected_tokens_per_step": c.expected_tokens,
            "standard_error": c.standard_error,
            "by_prompt": [[int(steps), round(tokens, 3)] for steps, tokens in c.by_prompt.tolist()],
            "draft_forwards_per_step": c.forwards / c.steps,
            "draft_rows_per_step": c.expanded / c.steps,
            "nodes_per_step": c.nodes / c.steps,
            "steps_by_accepted": c.lengths.long().tolist(),
            "plan": self.plan.in_force(),
            "seconds": round(self.seconds, 2),
        }


@dataclass
class Laboratory:
    """Runs a trial; keeps what the target has written."""

    pair: Pair
    trial: Trial
    report: Report = lambda _: None
    lessons: dict[float, Lesson] = field(default_factory=dict)
    posteriors: list[Posterior] = field(default_factory=list)

    def __post_init__(self) -> None:
        trial = self.trial
        self._prompts = self.pair.prompts(trial.prompts.prompts, trial.seed)
        first_unused = trial.seed + len(trial.prompts.prompts)
        self._calibration = self.pair.prompts(trial.calibration.prompts, first_unused)
        self._perturb = perturb_on(self.pair.draft.device)

    def check(self) -> None:
        """Make every plan of the trial.

        Raises:
            ValueError: where an option does not fit.
        """
        for temperature in self.trial.temperatures:
            for budget, method in self._pairs(temperature):
                method.plan(self._setting(budget, temperature, Lesson((0.5,))))

    @property
    def cells(self) -> int:
        return sum(len(list(self._pairs(t))) for t in self.trial.temperatures)

    def run(self) -> Iterator[Cell]:
        """Cell by cell, in the order of temperatures, budgets and methods.

        On the CPU each of torch's threads works on a cell of its own: most operations are too
        small to share.
        """
        threads = torch.get_num_threads()
        workers = min(threads, _MOST_WORKERS) if self.pair.draft.device.type == "cpu" else 1
        share = max(1, threads // workers)
        pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(share,))
        with pool:
            for temperature in self.trial.temperatures:
                self.report(f"T = {temperature:g}: the target writes")
                given = self.trial.prompts.given
                written = pool.submit(self._write, self._prompts, given, temperature)
                lesson = pool.submit(self._learn, temperature).result()
                self.lessons[temperature] = lesson
                text = written.result()
                self.posteriors.append(self._posterior(text, temperature, lesson.beta))
                cell = partial(self._cell, text, lesson)
                places = list(self._pairs(temperature))
                settings = [self._setting(budget, temperature, lesson) for budget, _ in places]
                yield from pool.map(cell, [method for _, method in places], settings)

    def _pairs(self, temperature: float) -> Iterator[tuple[int, Method]]:
        for budget in self.trial.budgets:
            for method in self.trial.methods:
                if temperature > 0 or method.greedy:
                    yield budget, method

    def _setting(self, budget: int, temperature: float, lesson: Lesson) -> Setting:
        depth = min(self.trial.max_depth, budget)
        return Setting(budget, temperature, depth, lesson.acceptance, len(self.pair.drafts))

    def _write(self, prompts: Prompts, given: list[str] | None, temperature: float) -> torch.Tensor:
        """Return what follows the prompts: what is ``given``, or what the target writes."""
        # The last step may begin one token before the end and accept a whole path.
        count = self.trial.tokens + self.trial.max_depth + 1
        if given is not None:
            return self.pair.continuations(given, count)
        return write(self.pair.target, prompts, temperature, count)

    def _learn(self, temperature: float) -> Lesson:
        pair, prompts = self.pair, self._calibration
        lesson = Lesson()
        names = {method.name for method in self.trial.methods}
        learning = [method for method in self.trial.methods if method.name in _LEARNING]
        text = self._write(prompts, self.trial.calibration.given, temperature)
        along = text[:, : self.trial.tokens]
        if learning or "sequoia" in names:
            lesson.acceptance = positional_acceptance(
                pair.target, pair.draft, prompts, along, temperature
            )
        lesson.beta = fitted_beta(pair.draft, prompts, along, temperature)
        for method in learning:
            setting = self._setting(LEARNING_BUDGET, temperature, lesson)
            lesson.values[method.name] = learn_values(pair.drafts, prompts, text, method, setting)
        return lesson

    def _posterior(self, text: torch.Tensor, temperature: float, beta: float) -> Posterior:
        self.report(f"T = {temperature:g}: posterior entropy")
        along = text[:, : self.trial.tokens]
        return measure(self.pair.draft, self._prompts, along, temperature, beta)

    def _cell(self, text: torch.Tensor, lesson: Lesson, method: Method, setting: Setting) -> Cell:
        self.report(f"T = {setting.temperature:g}, {setting.budget} nodes: {method.label}")
        started = time.perf_counter()
        plan = method.plan(setting)
        counts = Counts.none(plan.shape.max_depth)
        estimate = lesson.values.get(method.name) or AcceptanceEstimate(self.pair.draft.device)
        picker = ChildPicker(plan, self._perturb, estimate)
        pick: Pick = picker
        if setting.greedy and method.greedy_draft != 1:
            pick = _at_temperature(pick, method.greedy_draft)
        vocabulary = self.pair.draft.config.get_text_config().vocab_size
        size = max(16, _NODES_AT_ONCE // setting.budget)
        for start in range(0, len(self._prompts), size):
            rows = slice(start, start + size)
            prompts = self._prompts.part(rows)
            verifier = self._verifier(method, plan, prompts, text[rows], setting.temperature)
            tokens, temperature = self.trial.tokens, setting.temperature
            lookups = look_ups(method, plan, vocabulary, prompts, picker, temperature, tokens)
            counts += simulate(
                plan,
                pick,
                method.drafts_of(self.pair.drafts),
                prompts,
                verifier,
                temperature,
                tokens,
                lookups=lookups,
            )
        return Cell(method, setting, plan, counts, time.perf_counter() - started)

    def _verifier(
        self,
        method: Method,
        plan: TreePlan,
        prompts: Prompts,
        text: torch.Tensor,
        temperature: float,
    ) -> Verifier:
        if plan.rule == "match":
            return Replay(text)
        positions = prompts.longest + self.trial.tokens + self.trial.max_depth + 1
        if method.block:
            return Blocks(self.pair.target, prompts, temperature, positions)
        return Walk(self.pair.target, prompts, DRAWN_RULES[plan.rule], temperature, positions)


def _at_temperature(pick: Pick, temperature: float) -> Pick:
    def picked(
        logits: torch.Tensor, rows: DraftRows, all_greedy: bool, asked: Asked | None = None
    ) -> Children:
        return pick(logits / temperature, rows, all_greedy, asked)

    return picked

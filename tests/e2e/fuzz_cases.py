"""Random schedules for fuzzed engines: requests with any parameters, arrivals, aborts and
resets."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import workload
from hypothesis import strategies as st

MAX_MODEL_LEN = 320
VOCABULARY = 1024
BASES = 4
"""Number of texts that prompts begin with."""


@dataclass(frozen=True)
class Arrival:
    """A request that arrives after ``at`` engine steps, or when request ``follows`` has ended.

    The prompt is ``length`` tokens of text ``base`` and then ``tail``. If the request follows
    another, its prompt is the other's prompt and answer and then ``tail``; the answer is left out
    if the other was aborted. ``abort`` is the number of steps after its arrival at which it is
    aborted.
    """

    base: int
    length: int
    params: Mapping[str, Any]
    tail: list[int] = field(default_factory=list)
    at: int = 0
    follows: int | None = None
    abort: int | None = None
    priority: int = 0


@dataclass(frozen=True)
class Schedule:
    """Requests in order of arrival.

    ``resets`` holds the steps at which the prefix cache is emptied and every running request
    preempted. With ``resumed``, every request is preempted once, when all its tokens but one fill
    blocks, which stay in the prefix cache.
    """

    arrivals: list[Arrival]
    resets: list[int] = field(default_factory=list)
    resumed: bool = False

    def as_json(self) -> dict[str, Any]:
        """Return a JSON object without the fields that have their default value."""
        usual = asdict(Arrival(base=-1, length=0, params={}))
        arrivals = [
            {k: v for k, v in asdict(each).items() if k == "params" or v != usual[k]}
            for each in self.arrivals
        ]
        others = {"resets": self.resets, "resumed": self.resumed}
        return {"arrivals": arrivals} | {name: value for name, value in others.items() if value}


def schedule_of(value: Mapping[str, Any]) -> Schedule:
    arrivals = [Arrival(**{"length": 0, **arrival}) for arrival in value["arrivals"]]
    return Schedule(arrivals, list(value.get("resets", ())), value.get("resumed", False))


@functools.cache
def texts() -> list[list[int]]:
    """Return the tokens of the texts that prompts begin with."""
    from transformers import AutoTokenizer

    encode = AutoTokenizer.from_pretrained(workload.without_tree()["model"]).encode
    found = []
    for base in range(BASES):
        text = "\n".join(workload.PROMPTS[base * 16 : base * 16 + 16])
        found.append(encode(text)[:MAX_MODEL_LEN])
    return found


def prompt_of(arrival: Arrival, before: list[int] | None = None) -> list[int]:
    """Return a prompt; ``before`` is prompt and answer of the request that it follows."""
    start = texts()[arrival.base][: arrival.length] if before is None else before
    return (start + arrival.tail)[: MAX_MODEL_LEN - 1]


TOKENS = st.integers(1, VOCABULARY - 1)  # 0 ends a text
GRAMMARS = [
    {"regex": r"(ab|cd){2,6}[0-9]{1,4}!"},
    {"choice": ["yes", "no", "perhaps", "def f(x):\n    return x"]},
    {"json": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
        "required": ["name", "age"],
    }},
]  # fmt: skip
OPTIONAL: dict[str, st.SearchStrategy[Any]] = {
    "top_p": st.sampled_from([0.05, 0.5, 0.9, 0.99]),
    "top_k": st.sampled_from([1, 2, 5, 50, VOCABULARY]),
    "min_p": st.sampled_from([0.01, 0.2, 0.9]),
    "presence_penalty": st.sampled_from([-1.0, 0.5, 2.0]),
    "frequency_penalty": st.sampled_from([-0.5, 0.7]),
    "repetition_penalty": st.sampled_from([0.8, 1.3]),
    "logit_bias": st.dictionaries(
        TOKENS.map(str), st.sampled_from([-100.0, -3.0, 4.0, 30.0]), min_size=1, max_size=4
    ),
    "allowed_token_ids": st.sampled_from([list(range(60, 400)), [7], [5, 300, 17]]),
    "bad_words": st.sampled_from([["self"], [" the", "return", "def f"]]),
    "min_tokens": st.sampled_from([1, 5, 16, 30]),
    "stop": st.sampled_from([["\n"], ["self", "("], ["return x"], ["e"]]),
    "stop_token_ids": st.sampled_from([[272], [201, 233, 270, 283, 300]]),
    "include_stop_str_in_output": st.just(True),
    "ignore_eos": st.just(True),
    "logprobs": st.sampled_from([0, 1, 5, 20]),
    "prompt_logprobs": st.sampled_from([0, 3]),
    "logprob_token_ids": st.sampled_from([[5], [5, 300, 17]]),
    "flat_logprobs": st.just(True),
    "n": st.sampled_from([2, 3]),
    "structured_outputs": st.sampled_from(GRAMMARS),
    "thinking_token_budget": st.sampled_from([0, 1, workload.THINKING_BUDGET]),
    "skip_reading_prefix_cache": st.just(True),
    "repetition_detection": st.just(
        {"max_pattern_size": 4, "min_pattern_size": 1, "min_count": 3}
    ),
}  # fmt: skip
"""Values of the optional parameters."""

SIZES = st.sampled_from([1, 2, 3, 7, 8, 9, 16, 17, 18, 24, 40, 70])


@st.composite
def parameters(draw: st.DrawFn) -> dict[str, Any]:
    """Draw keyword arguments of ``SamplingParams`` whose answer is the same on every engine."""
    params: dict[str, Any] = {"max_tokens": draw(SIZES)}
    params["temperature"] = draw(st.sampled_from([0.0, 0.0, 0.05, 0.6, 1.0, 1.0, 1.5, 2.0]))
    if params["temperature"]:
        params["seed"] = draw(st.integers(0, 3) | st.sampled_from([-1 << 40, 1 << 62]))
    names = draw(st.lists(st.sampled_from(sorted(OPTIONAL)), max_size=4, unique=True))
    params |= {name: draw(OPTIONAL[name]) for name in names}
    if not params["temperature"]:
        params.pop("n", None)
    if "logprob_token_ids" in params:
        params.pop("logprobs", None)
    params["max_tokens"] = max(params["max_tokens"], params.get("min_tokens", 0))
    return params


def lengths(block_size: int) -> st.SearchStrategy[int]:
    """Draw prompt lengths, most of them near multiples of the block size."""
    most = MAX_MODEL_LEN - 1
    ends = [size for size in range(0, most + 1, block_size) if size]
    near = [size + more for size in [*ends, most] for more in (-1, 0, 1, 2)]
    return st.sampled_from([1, 2, *(n for n in near if n <= most)]) | st.integers(1, most)


@st.composite
def schedules(draw: st.DrawFn, block_size: int, most: int = 6) -> Schedule:
    """Draw schedules of 1 to ``most`` requests."""
    arrivals: list[Arrival] = []
    for number in range(draw(st.integers(1, most))):
        follows = None
        if number and draw(st.integers(0, 3)) == 0:
            follows = draw(st.integers(0, number - 1))
        arrivals.append(
            Arrival(
                base=draw(st.integers(0, BASES - 1)),
                length=draw(lengths(block_size)) if follows is None else 0,
                params=draw(parameters()),
                tail=draw(st.lists(TOKENS, max_size=2)),
                at=draw(st.sampled_from([0, 0, 0, 1, 2, 3, 5, 9])),
                follows=follows,
                abort=draw(st.none() | st.none() | st.none() | st.integers(1, 8)),
                priority=draw(st.integers(0, 2)),
            )
        )
    resets = draw(st.just([]) | st.lists(st.integers(1, 8), min_size=1, max_size=2, unique=True))
    return Schedule(arrivals, resets, resumed=draw(st.sampled_from([False, False, False, True])))

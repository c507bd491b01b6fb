"""The requests of these tests by what they ask of the sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engine_process import Request, Run

from dyntree_plugin import pair

PROMPTS = pair.held_out_prompts(200)
MAX_MODEL_LEN = 512
END = 0  # end-of-text token in the pair's configuration

REASONING = {"reasoning_start_str": "(", "reasoning_end_str": ")"}
"""Text in parentheses is a thought. Answers open parentheses often, so budgets run out often."""
THINKING_BUDGET = 3

PHRASES = [
    *("self.", "(self", "self,", "len(", "else:", "return self", "of the", "(self,", "(self."),
    *("(self):", "= self.", "= self._", "is None:", "in self.", ".write(", "if self.", "=None):"),
    *("else:\n               ", ":\n            self", ":\n            raise", "self):\n       "),
    *('):\n    """', ")\n\n    def", "[0]", "__(self,"),
]
"""Bad words of two or three tokens, which are frequent in code."""

SEEDS = [number * 7919 - (number % 3) * (1 << 40) for number in range(len(PROMPTS))]

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "nucleus": {"temperature": 0.8, "top_p": 0.95},
    "full": {"temperature": 1.0},
}


def ask(number: int, kind: str, **params: Any) -> Request:
    """Return a request with one of the prompts; equal arguments give equal requests."""
    seed = {} if kind == "greedy" else {"seed": SEEDS[number]}
    return Request(PROMPTS[number], {"max_tokens": 40} | KINDS[kind] | seed | params)


def each_kind(numbers: range, **params: Any) -> list[Request]:
    kinds = list(KINDS)
    return [ask(number, kinds[number % len(kinds)], **params) for number in numbers]


def long(number: int, kind: str, tokens: int, **params: Any) -> Request:
    """Return a request whose prompt has ``tokens`` tokens of several prompts."""
    text = "\n".join(PROMPTS[(number * 7 + at) % len(PROMPTS)] for at in range(12))
    seed = {} if kind == "greedy" else {"seed": SEEDS[number]}
    return Request(text, {"max_tokens": 24} | KINDS[kind] | seed | params, keep=tokens)


def long_each_kind(numbers: range, tokens: int, **params: Any) -> list[Request]:
    kinds = list(KINDS)
    return [long(number, kinds[number % len(kinds)], tokens, **params) for number in numbers]


def adapters_in_turn(requests: Sequence[Request], folders: Sequence[str]) -> list[Request]:
    """Give every third request no adapter, and the others the two in turn."""
    of = (None, *folders)
    # Kinds of requests come in threes, too.
    return [replace(r, adapter=of[(n + n // 3) % 3]) for n, r in enumerate(requests)]


_LONG_WORDS = each_kind(
    range(111, 114), bad_words=["self", 700 * "ab ", 700 * "c ", " the", "return"]
)
_LONG_LISTS = [
    *each_kind(range(102, 105), allowed_token_ids=4 * list(range(60, 400))),
    *each_kind(range(105, 108), stop_token_ids=list(range(1, 200)), min_tokens=6),
]
FOR_A_CPU = [*_LONG_WORDS, *_LONG_LISTS]
"""Requests with longer lists than vLLM's sampler on CUDA has room for."""

FEATURES: dict[str, list[Request]] = {
    "min_p": [ask(n, "full", min_p=0.1) for n in range(6)],
    "top_k": [ask(n, "full", top_k=3) for n in range(6)],
    "logit_bias": [
        ask(n, kind, logit_bias={"5": 4.0, "300": 3.5, "17": -50.0})
        for n, kind in enumerate(("greedy", "nucleus", "full") * 2)
    ],
    "min_tokens": [
        ask(n, kind, min_tokens=12, logit_bias={str(END): 25.0})
        for n, kind in enumerate(("greedy", "nucleus", "full"))
    ],
    "allowed_token_ids": each_kind(range(20, 26), allowed_token_ids=list(range(60, 400))),
    "long lists": _LONG_LISTS,
    "seeds beyond int64": [
        ask(n, "full", seed=2**63 - 1, n=3, max_tokens=16) for n in range(108, 111)
    ],
    "logprobs": each_kind(range(26, 35), logprobs=3),
    "logprob_token_ids": each_kind(range(64, 70), logprob_token_ids=[5, 300, 17]),
    "prompt_logprobs": each_kind(range(35, 38), prompt_logprobs=1, logprobs=0),
    "several": [ask(n, "full", n=3) for n in range(38, 41)],
    "low and high temperatures": [
        ask(n, "full", temperature=t) for n, t in enumerate((0.05, 0.3, 1.7, 2.0), start=41)
    ],
    "stop": [
        *each_kind(range(45, 57), stop=["\n", "self"]),
        *each_kind(range(57, 60), stop=["("], include_stop_str_in_output=True),
        *each_kind(range(60, 63), stop_token_ids=list(range(200, 300))),
    ],
    "max_tokens": [
        ask(n, kind, max_tokens=tokens)
        for n, tokens in enumerate((1, 2, 3, 5, 8, 9, 10, 17, 18))
        for kind in KINDS
    ],
    "max_model_len": [
        long(n, kind, MAX_MODEL_LEN - left, max_tokens=None, ignore_eos=True)
        for n, left in enumerate((1, 2, 3, 5, 9, 10, 17, 18, 24))
        for kind in KINDS
    ],
    "penalties": [
        *each_kind(range(70, 73), repetition_penalty=1.3),
        *each_kind(range(73, 76), presence_penalty=0.8, frequency_penalty=0.4),
    ],
    "bad_words": [
        *each_kind(range(76, 82), bad_words=["self", " the", "return"]),
        *_LONG_WORDS,
        *each_kind(range(186, 198), bad_words=PHRASES),
    ],
    "thinking_budget": each_kind(range(180, 186), thinking_token_budget=THINKING_BUDGET),
    "structured_output": [
        *each_kind(range(82, 85), structured_outputs={"regex": r"(ab|cd){3,9}[0-9]{2,5}!"}),
        *each_kind(range(85, 88), structured_outputs={"json": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
            "required": ["name", "age"],
        }}),
    ],
}  # fmt: skip

_TEMPERATURES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.0},
)


def repetitive(request: Request, number: int) -> Request:
    """Return a like request with a penalty at one of three temperatures; every fourth has none."""
    seed = {"seed": SEEDS[number]} if number % 3 else {}
    penalty = {"repetition_penalty": 1.1} if number % 4 else {}
    params = {**request.params, **_TEMPERATURES[number % 3], **penalty}
    params.pop("top_p", None)
    params.pop("seed", None)
    return Request(request.prompt, params | seed, keep=request.keep)


REPETITIVE = [repetitive(ask(number, "full"), number) for number in range(len(PROMPTS))]
"""Requests with the penalty that many models have by default, among ordinary ones."""

DEMANDING = long_each_kind(range(100, 124), 60, max_tokens=100, ignore_eos=True)
"""Requests that together outgrow a small cache."""

LONG_PROMPTS = long_each_kind(range(120, 126), 250)

OF_PATHS = {name: FEATURES[name] for name in ("penalties", "bad_words", "thinking_budget")} | {
    "phrases": each_kind(range(120, 150), bad_words=PHRASES),
    "demanding penalties": [repetitive(each, n) for n, each in enumerate(DEMANDING[::2])],
    "penalties of long prompts": [repetitive(each, n) for n, each in enumerate(LONG_PROMPTS)],
    "repetitive": REPETITIVE,
}
"""Requests with parameters that depend on the tokens before a row."""

_OBJECT = FEATURES["structured_output"][-1].params["structured_outputs"]
_REGEX = {"regex": r"(ab|cd){3,9}[0-9]{2,5}!"}
_ASKED: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.1},
    {"presence_penalty": 0.8, "frequency_penalty": 0.4},
    {"bad_words": ["self", " the", "return"]},
    {"structured_outputs": _REGEX},
    {"structured_outputs": _OBJECT},
    {"structured_outputs": {"choice": ["return self.name", "raise ValueError", "pass"]}},
    {"thinking_token_budget": THINKING_BUDGET},
    {"min_tokens": 12, "logit_bias": {str(END): 25.0}},
    {"allowed_token_ids": list(range(60, 400))},
    {"top_k": 5, "min_p": 0.02, "logprobs": 2},
    {"extra_args": {"dyntree_nodes": 3}},
    {"structured_outputs": _OBJECT, "repetition_penalty": 1.1, "min_tokens": 4},
    {"structured_outputs": _REGEX, "bad_words": ["ab"], "logit_bias": {"17": 3.0}},
    {"repetition_penalty": 1.3, "top_p": 0.9, "thinking_token_budget": THINKING_BUDGET},
    {"extra_args": {"dyntree_nodes": 0}, "frequency_penalty": 0.5},
    {},
)
"""Their number has no factor in common with that of the temperatures."""


def _as_people_ask(number: int) -> Request:
    seed = {"seed": SEEDS[number]} if number % len(_TEMPERATURES) else {}
    params = {"max_tokens": 32} | _TEMPERATURES[number % len(_TEMPERATURES)] | seed
    return Request(PROMPTS[number], params | _ASKED[number % len(_ASKED)])


FROM_PEOPLE = [_as_people_ask(n) for n in range(len(_ASKED) * len(_TEMPERATURES))]
"""All that a request can ask for at each temperature, to be served in one batch."""


def limited(requests: Sequence[Request], *limits: int | None) -> Run:
    """Give the requests these limits on their trees' nodes in turn; None for no limit."""
    found = []
    for number, each in enumerate(requests):
        limit = limits[number % len(limits)]
        own = {} if limit is None else {"extra_args": {"dyntree_nodes": limit}}
        found.append(replace(each, params=each.params | own))
    return Run(found)


LIMITED = {
    "mixed limits": limited(each_kind(range(24)), 0, 3, None, 100, 1),
    "4 nodes": limited(each_kind(range(24)), 4),
    "0 nodes": limited(each_kind(range(24)), 0),
}
"""Requests that limit the nodes of their trees."""

DELIVERED = {
    **{
        name: Run(each_kind(range(12), max_tokens=tokens, ignore_eos=True))
        for tokens, name in enumerate(("one", "two", "three"), start=1)
    },
    "stopped": Run(
        [
            *each_kind(range(45, 57), stop=["\n", "self"]),
            *each_kind(range(57, 63), stop=["("], include_stop_str_in_output=True),
            *each_kind(range(60, 66), stop_token_ids=list(range(200, 300))),
            *each_kind(range(66, 72)),
        ]
    ),
    "capped": Run(
        [
            ask(number, "greedy", max_tokens=tokens, ignore_eos=True)
            for number, tokens in enumerate((3, 4, 5, 9, 17, 33, 64, 64))
        ]
    ),
    # The answers are of many lengths, so that some complete a block of 32 tokens at their end.
    "turns": Run([replace(each, turns=2) for each in each_kind(range(80, 112))], batch=8),
}
"""Requests whose tokens and cached blocks are counted."""

GAINS: dict[str, tuple[dict[str, Any], float]] = {
    "top_k": ({"top_k": 3}, 1.15),
    "allowed_token_ids": ({"allowed_token_ids": list(range(60, 400))}, 1.25),
    "repetition_penalty": ({"repetition_penalty": 1.3}, 1.04),
    "logit_bias": ({"logit_bias": {"5": 4.0, "300": 3.5, "17": -50.0}}, 1.04),
}
"""Parameters, and how many times the tokens per step drafts must gain that know them. Measured:
1.36, 1.42, 1.11 and 1.15."""


def _some(names: tuple[str, ...]) -> list[Request]:
    return [request for name in names for request in FEATURES[name][:6]]


OF_TWIN = {
    "parameters": [
        *_some(("top_k", "min_p", "logit_bias", "min_tokens", "allowed_token_ids", "long lists")),
        *each_kind(range(12)),
    ],
    "parameters that read paths": _some(("penalties", "bad_words", "thinking_budget")),
}

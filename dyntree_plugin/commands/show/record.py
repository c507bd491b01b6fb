"""Record a generation on an engine with trees."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from dyntree_plugin.commands.arguments import drafter
from dyntree_plugin.commands.engine import Task, engine, text_of_tokens, with_trees
from dyntree_plugin.commands.show.generation import Generation
from dyntree_plugin.commands.start import Announce
from dyntree_plugin.engine.configuration import tree_plan
from dyntree_plugin.options.options import DynTreeOptions

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams

_BEFORE = 8
"""Tokens that are decoded before a token, whose text may depend on them."""


def record(task: Task, announce: Announce) -> Generation:
    """Complete the first prompt on a new engine, and keep every tree."""
    # A process of vLLM's would import it again; one is started if the user asks for it.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    with announce("Loading vLLM"):
        from vllm import SamplingParams

        arguments = with_trees(task)
        params = SamplingParams(
            temperature=task.temperature,
            top_p=task.top_p,
            seed=task.seed,
            max_tokens=task.max_tokens,
        )
    with ExitStack() as stack:
        with announce(f"Starting target and {task.drafter}"):
            llm = stack.enter_context(engine(arguments))
        with announce("Completing with the tree"):
            return complete(llm, task.prompts[0], params)


def complete(llm: LLM, prompt: str, params: SamplingParams) -> Generation:
    """Complete a prompt on a running engine with trees, and keep every tree.

    No other request may run on the engine meanwhile.

    Raises:
        ValueError: if the engine has no trees.
    """
    from dyntree_plugin.engine.telemetry.trace import start_trace, stop_trace

    config = llm.llm_engine.vllm_config
    options, plan = DynTreeOptions.of(config.additional_config), tree_plan(config)
    speculation = config.speculative_config
    if options is None or plan is None or speculation is None or speculation.model is None:
        raise ValueError("this engine has no trees: start it with dyntree options")
    start_trace(llm)
    output = llm.generate(prompt, params, use_tqdm=False)[0]
    steps = stop_trace(llm)
    prompt_tokens = list(output.prompt_token_ids or ())
    tokens = list(output.outputs[0].token_ids)
    in_trees = {t for step in steps for t in (step.root_token, *step.tokens, *step.emitted)}
    text = text_of_tokens(llm)
    coupled = plan.coupled and params.temperature > 0
    drafts_own = not (coupled or plan.calibrated)
    return Generation(
        target=config.model_config.model,
        draft=speculation.model,
        dtype=str(config.model_config.dtype).removeprefix("torch."),
        temperature=params.temperature,
        top_p=params.top_p,
        seed=params.seed,
        node_budget=plan.shape.node_budget,
        options=options.model_dump(exclude_unset=True),
        prompt_tokens=prompt_tokens,
        tokens=tokens,
        pieces=pieces(llm.get_tokenizer().decode, [*prompt_tokens, *tokens]),
        texts={token: text(token) for token in sorted(in_trees)},
        steps=steps,
        chances="draft" if drafts_own else "estimated",
        drafter=drafter(str(speculation.method)),
    )


def pieces(decode: Callable[[Sequence[int]], str], tokens: Sequence[int]) -> list[str]:
    """Return the text of each token in its context; joined they are the whole text.

    If several tokens make one character, the last of them has it.
    """
    pieces: list[str] = []
    known = 0  # Number of leading tokens whose text is known.
    for end in range(1, len(tokens) + 1):
        start = max(known - _BEFORE, 0)
        text = decode(tokens[start:end])
        if text.endswith("\ufffd") and end < len(tokens):
            pieces.append("")
            continue
        pieces.append(text[len(decode(tokens[start:known])) :])
        known = end
    return pieces

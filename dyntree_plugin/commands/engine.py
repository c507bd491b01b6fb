"""Run vLLM's engine in this process, and read a model's configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dyntree_plugin.admission.model_files import problem_of
from dyntree_plugin.commands.arguments import DtypeName, Method, drafter
from dyntree_plugin.commands.render import Detokenise
from dyntree_plugin.options.methods import BLOCKS
from dyntree_plugin.options.options import NAMESPACE
from dyntree_plugin.tune.files import explained

if TYPE_CHECKING:
    from vllm import LLM

KV_CACHE_BYTES = 1 << 30
"""Size of the KV cache. Pages that are not written take no memory."""


@dataclass(frozen=True)
class Task:
    """Prompts to complete: by which models, and how.

    ``nodes``: most nodes of a tree. ``options``: more dyntree options. ``seed``: of the first
    prompt; each later prompt adds 1. ``draft``: None if it is part of the target (``method`` mtp).
    """

    target: str
    draft: str | None
    dtype: DtypeName
    nodes: int
    options: Mapping[str, Any]
    temperature: float
    top_p: float
    seed: int
    max_tokens: int
    prompts: Sequence[str]
    method: Method = "draft_model"

    @property
    def drafter(self) -> str:
        """The word for the draft."""
        return drafter(self.method)

    @property
    def models(self) -> list[str]:
        """Names of all models, including further drafts."""
        pair = [self.target, *([] if self.draft is None else [self.draft])]
        return [*pair, *self.options.get("drafts", ())]


def tokenizer_of(model: str) -> Any:
    """Return a model's tokenizer.

    Raises:
        ValueError: if it cannot be read.
    """
    from transformers import AutoTokenizer

    with explained(f"the tokenizer of {model!r} cannot be read"):
        return AutoTokenizer.from_pretrained(model)


def config_of(model: str) -> Any:
    """Return a model's configuration.

    Raises:
        ValueError: if it cannot be read.
    """
    from transformers import AutoConfig

    if problem := problem_of(model):
        raise ValueError(f"model {model!r} cannot be read: {problem}")
    with explained(f"the configuration of {model!r} cannot be read"):
        return AutoConfig.from_pretrained(model)


def text_config_of(model: str) -> Any:
    """Return the configuration of a model's text model.

    Raises:
        ValueError: if it cannot be read, or says no size of vocabulary and context.
    """
    config = config_of(model)
    with explained(f"the configuration of {model!r} cannot be read"):
        config = config.get_text_config()
        for name in ("vocab_size", "max_position_embeddings"):
            if not isinstance(getattr(config, name), int):
                raise TypeError(f"{name} must be an integer")
        return config


def tree_arguments(
    method: str, draft: str | None, nodes: int, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of ``LLM`` for trees of so many ``nodes`` with these dyntree options.

    ``draft``: None if it is part of the target, or there is none.
    """
    length, options = nodes, dict(options)
    if method in BLOCKS and draft is not None:
        length, options = block_length(draft), {"node_budget": nodes, **options}
    model = {} if draft is None else {"model": draft}
    return {
        "speculative_config": {"method": method, **model, "num_speculative_tokens": length},
        "additional_config": {NAMESPACE: options},
    }


def block_length(draft: str) -> int:
    """Return how many tokens a DFlash draft was trained to propose: its block less the root.

    Raises:
        ValueError: if its configuration does not say that.
    """
    size = getattr(config_of(draft), "block_size", None)
    if not isinstance(size, int) or size < 2:
        raise ValueError(
            f"--draft {draft!r}: block_size={size} in its config.json must be the rows of a block, "
            "at least 2"
        )
    return size - 1


@contextmanager
def engine(arguments: Mapping[str, Any]) -> Iterator[LLM]:
    """Start an engine, and shut it down at the end."""
    from vllm import LLM

    llm = LLM(**arguments)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown(timeout=30)


def with_trees(task: Task) -> dict[str, Any]:
    """Return the arguments of ``LLM`` for target and draft."""
    trees = tree_arguments(task.method, task.draft, task.nodes, task.options)
    return without_trees(task) | trees


def without_trees(task: Task) -> dict[str, Any]:
    """Return the arguments of ``LLM`` for the target without a draft."""
    # A token takes at least one byte of the prompt. Two more may precede it: a beginning of
    # sequence and a space.
    longest = max(len(prompt.encode()) + 2 for prompt in task.prompts)
    length = longest + task.max_tokens + task.nodes
    return shared_arguments(task.target, task.dtype, length, 1) | {
        "max_num_batched_tokens": length,
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        # Compiling would take longer than the whole command.
        "enforce_eager": True,
    }


def shared_arguments(model: str, dtype: str, length: int, requests: int) -> dict[str, Any]:
    """Return the arguments of ``LLM`` that the engines of all commands have.

    ``length``: most tokens of a request. ``requests``: how many run at once.
    """
    return {
        "model": model,
        "dtype": dtype,
        "max_model_len": length,
        "max_num_seqs": requests,
        # Every run computes its prompts itself.
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "use_tqdm_on_load": False,
    }


def text_of_tokens(llm: LLM) -> Detokenise:
    """Return the function that gives the text of any one token."""
    tokenizer = llm.get_tokenizer()
    # Some tokenizers drop the space before the first token of a text.
    before = tokenizer.encode("a", add_special_tokens=False)
    skipped = len(tokenizer.decode(before))

    def text(token: int) -> str:
        return tokenizer.decode([*before, token])[skipped:]

    return text

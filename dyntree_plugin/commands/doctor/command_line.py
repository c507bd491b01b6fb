"""What vLLM and dyntree would make of the arguments of `dyntree serve`, without loading weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn

import torch

from dyntree_plugin.admission import check, reasons
from dyntree_plugin.commands.doctor import kernels
from dyntree_plugin.commands.doctor.checks import Check, device_type, memory
from dyntree_plugin.engine.configuration import measured_kernels, plan_in_force
from dyntree_plugin.engine.fallback import chained_by_default

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

    from dyntree_kernels.dispatch import Measurement

_NAME = "command line"


def of_command_line(arguments: Sequence[str]) -> tuple[list[Check], VllmConfig | None]:
    """Every refusal as a check of its own, or what the engine would be; its configuration."""
    try:
        with reasons.shown():
            config = configuration(arguments)
    except reasons.MISTAKES as error:
        return [Check(_NAME, "fail", reason) for reason in reasons.of(error)], None
    return list(_admitted(config)), config


def configuration(arguments: Sequence[str]) -> VllmConfig:
    """As `vllm serve` makes it of its arguments.

    Raises:
        ValueError: for what vLLM or dyntree refuses.
        OSError: for a model that is not found.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.plugins import load_general_plugins
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ValueError(message)

    load_general_plugins()  # type: ignore[no-untyped-call]
    parser = Parser()  # type: ignore[no-untyped-call]
    command = ServeSubcommand()
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    parsed = parser.parse_args(["serve", *arguments])
    if parsed.model_tag is not None:
        parsed.model = parsed.model_tag
    command.validate(parsed)
    config: VllmConfig = AsyncEngineArgs.from_cli_args(parsed).create_engine_config()
    return config


def variants(config: VllmConfig | None) -> tuple[set[int], torch.dtype]:
    """Head sizes and type of the models of a configuration, or the most usual ones."""
    if config is None or config.speculative_config is None:
        return {128}, torch.bfloat16
    models = (config.model_config, config.speculative_config.draft_model_config)
    return {model.get_head_size() for model in models}, _dtype(config.model_config)


def _admitted(config: VllmConfig) -> Iterator[Check]:
    speculation = config.speculative_config
    plan = None if speculation is None else plan_in_force(speculation)
    if plan is None or speculation is None:
        advice = f"for trees add --dyntree '{{}}' and --speculative-config '{check.EXAMPLE}'"
        yield Check(_NAME, "warn", "it asks for no trees: vLLM would run as it is", advice)
        return
    in_force = ", ".join(f"{name}={value}" for name, value in plan.in_force().items())
    advice = check.token_budget_advice(config) or ""
    yield Check(_NAME, "warn" if advice else "ok", f"admitted: {in_force}", advice)
    if difference := check.vocabulary_advice(config):
        yield Check("vocabularies", "warn", difference)
    for found, chain_advice in chained_by_default(config.model_config):
        yield Check("requests", "warn", found, chain_advice)
    for name, model in (("target", config.model_config), ("draft", speculation.draft_model_config)):
        yield from _of_model(name, model, plan.shape.node_budget + 1, measured_kernels(config))
    cache = config.cache_config
    if device_type() == "cpu" and cache.kv_cache_memory_bytes is None:
        yield memory(cache.gpu_memory_utilization)


def _of_model(
    name: str, model: ModelConfig, rows: int, table: list[Measurement]
) -> Iterator[Check]:
    architecture = model.model_arch_config
    heads, kv_heads = architecture.total_num_attention_heads, model.get_total_num_kv_heads()
    shape = (heads, kv_heads, model.get_head_size(), _dtype(model), rows)
    yield kernels.attention(*shape, model=name, table=table)
    if device_type() == "cpu":
        yield kernels.layout(model.get_head_size(), _dtype(model), model=name)


def _dtype(model: ModelConfig) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, str(model.dtype).removeprefix("torch."))
    return dtype

"""Check the arguments of `dyntree serve` as vLLM and dyntree would, without loading weights."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn

import torch

from dyntree_kernels.features import KV_CACHE_DTYPES
from dyntree_plugin.admission import check, heads, reasons
from dyntree_plugin.admission.refusals import index_topk, kv_cache_dtype
from dyntree_plugin.admission.same_bits import bits_advice
from dyntree_plugin.admission.states import state_note
from dyntree_plugin.commands.doctor import kernels, offloading
from dyntree_plugin.commands.doctor.checks import device_type, memory
from dyntree_plugin.commands.doctor.report import Check
from dyntree_plugin.engine.configuration import asked_attention, further_drafts, plan_in_force
from dyntree_plugin.engine.fallback import default_chain_reasons
from dyntree_plugin.options import config_file

if TYPE_CHECKING:
    from vllm.config import ModelConfig, SpeculativeConfig, VllmConfig

    from dyntree_kernels.dispatch import Measurement

_NAME = "command line"


def command_line_checks(arguments: Sequence[str]) -> tuple[list[Check], VllmConfig | None]:
    """Return the refusals as checks, or the checks of an admitted engine and its configuration."""
    if not device_type():  # vLLM's parser would raise a RuntimeError.
        return [Check(_NAME, "fail", "vLLM finds no device here, and cannot read arguments")], None
    try:
        with reasons.not_logged():
            parsed = parse(arguments)
            config = configuration(parsed)
    except reasons.MISTAKES as error:
        return [Check(_NAME, "fail", reason) for reason in reasons.of(error)], None
    return list(_admitted(config, parsed)), config


def parse(arguments: Sequence[str]) -> Namespace:
    """Read arguments as `vllm serve` does; those that were not given have vLLM's defaults.

    Raises:
        ValueError: if vLLM or dyntree refuses one.
    """
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.plugins import load_general_plugins
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ValueError(message)

    config_file.check(arguments)
    load_general_plugins()  # type: ignore[no-untyped-call]
    parser = Parser()  # type: ignore[no-untyped-call]
    command = ServeSubcommand()
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    try:
        parsed: Namespace = parser.parse_args(["serve", *arguments])
    except IndexError:  # vLLM takes the value of a dotted argument without looking.
        raise ValueError(f"argument {arguments[-1]}: expected one argument") from None
    if parsed.model_tag is not None:
        parsed.model = parsed.model_tag
    command.validate(parsed)
    return parsed


def configuration(parsed: Namespace) -> VllmConfig:
    """Build the configuration that `vllm serve` builds from these arguments.

    Raises:
        ValueError: if vLLM or dyntree refuses them.
        OSError: if there is no such model.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    arguments = AsyncEngineArgs.from_cli_args(parsed)
    try:
        config: VllmConfig = arguments.create_engine_config()
    except Exception as error:  # Without trees vLLM's own.
        ours = [] if reasons.is_refusal(error) else reasons.of_model_files(arguments, error)
        if not ours:
            raise
        raise check.Refused(*ours) from error
    return config


def variants(config: VllmConfig | None) -> tuple[set[int], torch.dtype]:
    """Return the head sizes and the type of a configuration's models, or common ones without it.

    Latent attention and quantised caches have other kernels.
    """
    if config is None or config.speculative_config is None:
        return {128}, torch.bfloat16
    models = (config.model_config, config.speculative_config.draft_model_config)
    served = [each for each in models if not (each.use_mla or _quantised(config))]
    return {each.get_head_size() for each in served}, _dtype(config.model_config)


def xqa(config: VllmConfig | None) -> tuple[torch.dtype, int, int, int] | None:
    """Return the type, head size, head group and block size of a configuration's target, if its
    table has times of XQA on this GPU, or on any where there is none."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    asked, table = ("", []) if config is None else asked_attention(config)
    if config is None or asked != "auto" or _quantised(config):
        return None
    model, parallel = config.model_config, config.parallel_config
    group = model.get_num_attention_heads(parallel) // model.get_num_kv_heads(parallel)
    measured = any(
        x.implementation == "xqa"
        and device in (None, x.device)
        and (x.head_size, x.group) == (model.get_head_size(), group)
        for x in table
    )
    if not measured or _dtype(model) not in (torch.float16, torch.bfloat16):
        return None
    return _dtype(model), model.get_head_size(), group, _block_size(config)


def _quantised(config: VllmConfig) -> bool:
    return kv_cache_dtype(config) in KV_CACHE_DTYPES


def _block_size(config: VllmConfig) -> int:
    """Return the positions of a block: those of vLLM on CUDA, unless the user gives others."""
    cache = config.cache_config
    return cache.block_size if cache.user_specified_block_size else 16


def _admitted(config: VllmConfig, parsed: Namespace) -> Iterator[Check]:
    speculation = config.speculative_config
    plan = plan_in_force(speculation)
    if plan is None or speculation is None:
        advice = f"for trees add --dyntree '{{}}' and --speculative-config '{check.EXAMPLE}'"
        yield Check(_NAME, "warn", "it asks for no trees: vLLM would run without them", advice)
        return
    in_force = ", ".join(f"{name}={value}" for name, value in plan.in_force().items())
    advice = check.token_budget_advice(config) or ""
    given = parsed.max_num_seqs, parsed.max_num_batched_tokens
    warned = advice and given != (None, None)  # vLLM's defaults are nothing to warn of.
    yield Check(_NAME, "warn" if warned else "ok", f"admitted: {in_force}", advice)
    if plan.same_bits:
        unproven = device_type() != "cpu"
        yield Check("exactness", "warn" if unproven else "ok", bits_advice(device_type()))
    further = further_drafts(speculation)
    yield from _vocabularies(config, further)
    for reason, chain_advice in default_chain_reasons(config.model_config, plan.shape):
        yield Check("requests", "warn", reason, chain_advice)
    for line in heads.advice(config):
        yield Check("draft", "warn", line)
    for line in check.images_advice(config, device_type()):
        yield Check("images", "warn", line)
    for line in check.look_up_advice(config, device_type()):
        yield Check("look-up", "ok", line)
    if note := state_note(config):
        yield Check("states", "ok", note)
    yield from offloading.checks(config)
    models = [("target", config.model_config)]
    if plan.has_draft:
        models.append(("draft", speculation.draft_model_config))
    models += [(f"draft {each.model}", each.draft_model_config) for each in further]
    rows, (asked, table) = plan.shape.node_budget + 1, asked_attention(config)
    for name, model in models:
        # Drafts and quantised caches run on Triton on every GPU.
        kernel = asked if name == "target" and not _quantised(config) else "triton"
        yield from _model_checks(name, model, rows, kernel, table, _block_size(config))
    if device_type() == "cpu":
        cache = config.cache_config
        yield memory(cache.gpu_memory_utilization, cache.kv_cache_memory_bytes)


def _vocabularies(config: VllmConfig, further: Sequence[SpeculativeConfig]) -> Iterator[Check]:
    for each in (None, *further):
        named = "" if each is None else f"{each.model}: "
        if padding := check.padding_advice(config, each):
            yield Check("vocabularies", "ok", named + padding)
        if difference := check.vocabulary_advice(config, each):
            yield Check("vocabularies", "warn", named + difference)


def _model_checks(
    name: str, model: ModelConfig, rows: int, asked: str, table: list[Measurement], block: int
) -> Iterator[Check]:
    if model.use_mla and device_type() == "cuda":
        kernel = "vLLM's kernel" if index_topk(model) else "triton"
        yield Check(f"attention, {name}", "ok", f"{kernel} for latent attention")
        return
    architecture = model.model_arch_config
    heads, kv_heads = architecture.total_num_attention_heads, model.get_total_num_kv_heads()
    layers = model.get_total_num_hidden_layers()
    shape = (heads, kv_heads, model.get_head_size(), _dtype(model), rows, layers, block)
    yield kernels.attention(*shape, model=name, asked=asked, table=table)
    if device_type() == "cpu" and not model.use_mla:  # Latent attention has other kernels.
        yield kernels.layout(model.get_head_size(), _dtype(model), model=name)


def _dtype(model: ModelConfig) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, str(model.dtype).removeprefix("torch."))
    return dtype

"""Every symbol of vLLM that is replaced when the plugin loads, one function each.

Each is idempotent and leaves engines without dyntree options as they are.
"""

from __future__ import annotations

import argparse
import functools
import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from dyntree_plugin import options, plugin
from dyntree_plugin.admission import check, reasons
from dyntree_plugin.options import NAMESPACE, DynTreeOptions
from dyntree_plugin.strict_json import from_json

if TYPE_CHECKING:
    from vllm.config import VllmConfig

FLAG = f"--{NAMESPACE}"

_making_trees = ContextVar("the configuration that is made asks for trees", default=False)


def add_flag() -> None:
    """``EngineArgs.add_cli_args``: adds ``--dyntree``, which fills ``additional_config``.

    Why: vLLM has no hook for a plugin's own flags, but loads plugins before it builds its parser.
    Remove when vLLM lets plugins add arguments.
    """
    from vllm.engine.arg_utils import EngineArgs

    def adding_flag(stock: Any) -> Any:
        @functools.wraps(stock.__func__)
        def add_cli_args(parser: Any) -> Any:
            parser = stock.__func__(parser)
            for action in parser._actions:
                if "--additional-config" in action.option_strings:
                    action.__class__ = _keeping_options(type(action))
                    action.type = _of_single_keys(action.type)
            parser.add_argument_group(NAMESPACE, "Dynamic token tree.").add_argument(
                FLAG,
                action=_OptionsAction,
                type=_json_object,
                dest="additional_config",
                default=argparse.SUPPRESS,
                metavar="JSON",
                help=options.help_text().replace("%", "%%"),
            )
            return parser

        return staticmethod(add_cli_args)

    _replace(EngineArgs, "add_cli_args", adding_flag)


def admit_configs() -> None:
    """``Platform.check_and_update_config``: admits or refuses a configuration with a tree.

    Why: it is the platform's last word on a finished ``VllmConfig``, in the process that builds
    it and before any weights load, and where the worker class is chosen. There is no hook for
    general plugins. Remove when vLLM lets them check and update the configuration.
    """
    from vllm.platforms import current_platform

    def admitting(stock: Any) -> Any:
        @functools.wraps(stock.__func__)
        def check_and_update_config(cls: Any, vllm_config: VllmConfig) -> None:
            with reasons.logged():
                tree = DynTreeOptions.of(vllm_config.additional_config)
                if tree is not None:
                    plugin.admit(vllm_config, tree, cls.device_type)
            stock.__func__(cls, vllm_config)
            if tree is not None:
                plugin.settle(vllm_config, cls.device_type)

        return classmethod(check_and_update_config)

    _replace(type(current_platform), "check_and_update_config", admitting)


def refuse_before_vllm() -> None:
    """``EngineArgs.create_engine_config`` and
    ``SpeculativeConfig.verify_equal_vocab_size_if_draft_model``: our reasons, not vLLM's.

    Why: before vLLM asks the platform it has complained of what leads astray with trees: of other
    tokenizers for a padded vocabulary, of too few tokens per step for LoRA, of unknown arguments
    for our options. The vocabularies are then compared with everything else, by
    `refuse_unserved`. Remove when a plugin can check an engine's arguments.
    """
    from vllm.config import SpeculativeConfig
    from vllm.engine.arg_utils import EngineArgs

    def explaining(stock: Any) -> Any:
        @functools.wraps(stock)
        def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> VllmConfig:
            with_trees = _has_options(self.additional_config)
            token = _making_trees.set(with_trees)
            try:
                config: VllmConfig = stock(self, *args, **kwargs)
            except ValueError as error:
                ours = list(check.of_arguments(self, with_trees))
                if not ours or reasons.are_ours(error):
                    raise
                with reasons.logged():
                    raise check.Refused(*ours) from error
            finally:
                _making_trees.reset(token)
            return config

        return create_engine_config

    def without_trees(stock: Any) -> Any:
        @functools.wraps(stock)
        def verify_equal_vocab_size_if_draft_model(self: SpeculativeConfig) -> None:
            if not _making_trees.get():
                stock(self)

        return verify_equal_vocab_size_if_draft_model

    _replace(EngineArgs, "create_engine_config", explaining)
    _replace(SpeculativeConfig, "verify_equal_vocab_size_if_draft_model", without_trees)


def select_v2_runner() -> None:
    """``VllmConfig.use_v2_model_runner`` and ``_validate_v2_model_runner``: V2 on CPU, for trees
    and for `plugin.PLAIN_WORKER`.

    Why: without Triton, vLLM falls back to the V1 runner, and 0.32 also refuses V2, though
    ``vllm.triton_utils.dispatcher`` takes native kernels in Triton's place and our worker
    registers them. Remove when the choice of runner looks at the registered kernels.
    """
    from vllm.config import VllmConfig

    def choosing_v2(stock: Any) -> Any:
        return property(lambda self: _wants_v2(self) or stock.fget(self), doc=stock.__doc__)

    def without_triton(stock: Any) -> Any:
        @functools.wraps(stock)
        def _validate_v2_model_runner(self: VllmConfig) -> None:
            if not _wants_v2(self):
                stock(self)
            elif unsupported := self._get_v2_model_runner_unsupported_features():
                raise ValueError(
                    f"{NAMESPACE} needs vLLM's V2 model runner, which does not support: "
                    + ", ".join(unsupported)
                )

        return _validate_v2_model_runner

    _replace(VllmConfig, "use_v2_model_runner", choosing_v2)
    _replace(VllmConfig, "_validate_v2_model_runner", without_triton)


def _replace(owner: type, name: str, make: Callable[[Any], Any]) -> None:
    """Sets `owner.name` to `make` of the stock attribute; does nothing the second time."""
    marker = f"_{NAMESPACE}_replaced_{name}"
    if marker not in vars(owner):
        setattr(owner, marker, True)
        setattr(owner, name, make(inspect.getattr_static(owner, name)))


def reserve_scratch_slots() -> None:
    """``VllmConfig.num_lookahead_tokens``: KV slots for the nodes that drafting expands.

    Why: vLLM reserves one slot per draft token; a tree expands nodes that its budget then leaves
    out, and every expanded node needs a slot in the draft's cache. Remove when a speculator can
    say how many slots it needs.
    """
    from vllm.config import VllmConfig

    from dyntree_plugin.engine import configuration

    def reserving_scratch(stock: Any) -> Any:
        def num_lookahead_tokens(self: VllmConfig) -> int:
            tokens: int = stock.fget(self)
            speculation = self.speculative_config
            if speculation is None or not configuration.is_marked(speculation):
                return tokens
            # One more: the last emitted token, which the draft reads before the target does.
            return max(tokens, configuration.scratch_slots(speculation) + 1)

        return property(num_lookahead_tokens)

    _replace(VllmConfig, "num_lookahead_tokens", reserving_scratch)


def admit_sampling_parameters() -> None:
    """``SamplingParams._validate_spec_decode``: min-p and logit bias with trees.

    Why: vLLM refuses them with any speculation, for its rejection sampler's sake; matching the
    target's own samples serves them exactly. Remove when vLLM refuses by the rule in use.
    """
    from vllm.sampling_params import SamplingParams

    from dyntree_plugin.engine import configuration

    def admitting(stock: Any) -> Any:
        @functools.wraps(stock)
        def _validate_spec_decode(self: SamplingParams, speculative_config: Any) -> None:
            if speculative_config is None or not configuration.is_marked(speculative_config):
                stock(self, speculative_config)

        return _validate_spec_decode

    _replace(SamplingParams, "_validate_spec_decode", admitting)


def fit_requests() -> None:
    """``InputProcessor.process_inputs``: refuses, with trees and for `plugin.PLAIN_WORKER`, what
    the V2 runner's sampler has no room for.

    Why: nothing checks it before the worker does, whose error ends the engine; and ``verify`` comes
    before the tokenizer has read the bad words. Remove when vLLM checks it.
    """
    from vllm.platforms import current_platform
    from vllm.v1.engine.input_processor import InputProcessor

    from dyntree_plugin.engine import limits

    def fitting(stock: Any) -> Any:
        @functools.wraps(stock)
        def process_inputs(self: InputProcessor, *args: Any, **kwargs: Any) -> Any:
            request = stock(self, *args, **kwargs)
            if request.sampling_params is not None and _wants_v2(self.vllm_config):
                on_cpu = current_platform.is_cpu()
                limits.fit(request.sampling_params, self.model_config, on_cpu=on_cpu)
            return request

        return process_inputs

    _replace(InputProcessor, "process_inputs", fitting)


def carry_tree_stats() -> None:
    """``SchedulerStats`` and ``PrometheusStatLogger``: our counts in vLLM's stats channel.

    Why: the channel decodes statistics by their declared type, and the logger makes the class of
    speculation metrics that it names, which vLLM itself replaces for Ray. Engines without trees
    keep what they had: our types then hold nothing of ours. It must come before a process's first
    engine: msgspec reads the declared type once and for all. Remove when a plugin can register
    statistics.
    """
    from vllm.v1.metrics.loggers import PrometheusStatLogger
    from vllm.v1.metrics.stats import SchedulerStats

    from dyntree_plugin.engine.telemetry.prometheus import TreeSpecDecodingProm
    from dyntree_plugin.engine.telemetry.stats import TreeSpecDecodingStats

    SchedulerStats.__annotations__["spec_decoding_stats"] = TreeSpecDecodingStats | None
    PrometheusStatLogger._spec_decoding_cls = TreeSpecDecodingProm


def log_drafts_alone() -> None:
    """``SpecDecodingLogging.observe``: leaves out statistics of steps that verified nothing.

    Why: ours come with every step, and vLLM's log line of an interval divides by its drafts. Remove
    when the log line copes with none.
    """
    from vllm.v1.spec_decode.metrics import SpecDecodingLogging

    def with_drafts(stock: Any) -> Any:
        @functools.wraps(stock)
        def observe(self: SpecDecodingLogging, spec_decoding_stats: Any) -> None:
            if spec_decoding_stats.num_drafts:
                stock(self, spec_decoding_stats)

        return observe

    _replace(SpecDecodingLogging, "observe", with_drafts)


def _wants_v2(vllm_config: VllmConfig) -> bool:
    plain = vllm_config.parallel_config.worker_cls == plugin.PLAIN_WORKER
    return _has_options(vllm_config.additional_config) or plain


def _has_options(additional_config: object) -> bool:
    return isinstance(additional_config, Mapping) and NAMESPACE in additional_config


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = from_json(text)
    except ValueError as error:
        example = "an example is '{\"node_budget\": 16}'"
        raise argparse.ArgumentTypeError(f"{error}; {example}") from None
    try:
        DynTreeOptions.parse(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return dict(value)


def _of_single_keys(stock: Any) -> Callable[[str], Any]:
    """vLLM's way to read ``--additional-config``, of which the last of two equal keys stands; but
    not where our options are in it."""

    @functools.wraps(stock)
    def read(text: str) -> Any:
        try:
            value = stock(text)
        except RecursionError:
            value = {NAMESPACE: text}  # The reason is told below.
        if _has_options(value):
            try:
                from_json(text)
            except ValueError as error:
                raise argparse.ArgumentTypeError(str(error)) from None
        return value

    return read


def _merge(action: argparse.Action, first: Any, second: Any) -> Any:
    if not (isinstance(first, Mapping) and isinstance(second, Mapping)):
        return second
    try:
        return options.merge_options(first, second)
    except ValueError as error:
        raise argparse.ArgumentError(action, str(error)) from None


class _OptionsAction(argparse.Action):
    """Merges its options into those that the namespace's ``additional_config`` holds already."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        config = dict(getattr(namespace, self.dest, None) or {})
        config[NAMESPACE] = _merge(self, config.get(NAMESPACE), values)
        setattr(namespace, self.dest, config)


def _keeping_options(stock: Any) -> type[argparse.Action]:
    """The class of vLLM's own ``--additional-config``, made to keep options given before it.

    In vLLM a second ``--additional-config`` replaces the first, and each dotted one is a second.
    """

    def __call__(
        self: argparse.Action,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        earlier = getattr(namespace, self.dest, None) or {}
        if NAMESPACE in earlier and isinstance(values, Mapping):
            merged = _merge(self, earlier[NAMESPACE], values.get(NAMESPACE, {}))
            values = {**values, NAMESPACE: merged}
        stock.__call__(self, parser, namespace, values, option_string)

    return type(f"KeepingOptions{stock.__name__}", (stock,), {"__call__": __call__})

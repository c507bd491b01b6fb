"""Replace symbols of vLLM when the plugin loads, one function for each.

A second call of a function changes nothing, and engines without dyntree options are not affected.
"""

from __future__ import annotations

import argparse
import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from dyntree_plugin.admission import arguments, check, reasons
from dyntree_plugin.engine.configuration import PLAIN_WORKER
from dyntree_plugin.options import pages as option_pages
from dyntree_plugin.options.flag import (
    OptionsAction,
    has_options,
    json_object,
    keeping_options,
    single_keys,
)
from dyntree_plugin.options.options import NAMESPACE, DynTreeOptions

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

    Admit = Callable[[VllmConfig, DynTreeOptions, str], None]
    ConfigureScheduler = Callable[[VllmConfig, str], None]

FLAG = f"--{NAMESPACE}"

_making_trees = ContextVar("the configuration being made has dyntree options", default=False)


def add_flag() -> None:
    """Add ``--dyntree``, which fills ``additional_config``: ``EngineArgs.add_cli_args``.

    Why: vLLM has no hook for a plugin's flags, but loads plugins before it builds its parser.
    Remove when vLLM lets plugins add arguments.
    """
    from vllm.engine.arg_utils import EngineArgs

    def adding_flag(stock: Any) -> Any:
        @functools.wraps(stock.__func__)
        def add_cli_args(parser: Any) -> Any:
            parser = stock.__func__(parser)
            for action in parser._actions:
                if "--additional-config" in action.option_strings:
                    action.__class__ = keeping_options(type(action))
                    action.type = single_keys(action.type)
            parser.add_argument_group(NAMESPACE, "Dynamic token tree.").add_argument(
                FLAG,
                action=OptionsAction,
                type=json_object,
                dest="additional_config",
                default=argparse.SUPPRESS,
                metavar="JSON",
                help=option_pages.help_text().replace("%", "%%"),
            )
            return parser

        return staticmethod(add_cli_args)

    replace(EngineArgs, "add_cli_args", adding_flag)


def admit_configs(admit: Admit, configure_scheduler: ConfigureScheduler) -> None:
    """Admit or refuse configurations with trees: ``Platform.check_and_update_config``.

    ``admit`` gets the configuration before the platform does, ``configure_scheduler`` after it.

    Why: here the platform completes a ``VllmConfig`` and chooses the worker class, in the process
    that builds the configuration and before any weights load. General plugins have no hook there.
    Remove when vLLM lets them check and update the configuration.
    """
    from vllm.platforms import current_platform

    def admitting(stock: Any) -> Any:
        @functools.wraps(stock.__func__)
        def check_and_update_config(cls: Any, vllm_config: VllmConfig) -> None:
            with reasons.logged():
                tree = DynTreeOptions.of(vllm_config.additional_config)
                if tree is not None:
                    admit(vllm_config, tree, cls.device_type)
            stock.__func__(cls, vllm_config)
            if tree is not None:
                configure_scheduler(vllm_config, cls.device_type)

        return classmethod(check_and_update_config)

    replace(type(current_platform), "check_and_update_config", admitting)


def refuse_before_vllm() -> None:
    """Give dyntree's reasons before vLLM's: ``EngineArgs.create_engine_config`` and
    ``SpeculativeConfig.verify_equal_vocab_size_if_draft_model``.

    Why: vLLM raises errors before it asks the platform, and with trees some of them mislead: for
    LoRA it blames the tokens per step, for dyntree's options unknown arguments, for method suffix a
    missing package, and for a draft that does not go with its method whatever it stumbles over. It
    finds a draft's method by the path, and not by the file. It also refuses a draft whose
    vocabulary is only padded to another size, which trees serve: `refuse_unserved` compares the
    tokenizers instead. Remove when a plugin can check an engine's arguments.
    """
    from vllm.config import SpeculativeConfig
    from vllm.engine.arg_utils import EngineArgs

    from dyntree_plugin.engine import configuration

    def explaining(stock: Any) -> Any:
        @functools.wraps(stock)
        def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> VllmConfig:
            with_trees = has_options(self.additional_config)
            token = _making_trees.set(with_trees)
            try:
                if with_trees:
                    _name_method(self)
                config: VllmConfig = stock(self, *args, **kwargs)
            except Exception as error:  # Transformers raises any on a wrong config.json.
                ours = list(arguments.refusals(self, with_trees, error))
                if with_trees and not ours:
                    ours = reasons.of_model_files(self, error)
                if not ours or reasons.is_refusal(error):
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
            # A worker checks an admitted configuration again when it derives a draft's.
            if not (_making_trees.get() or configuration.is_marked(self)):
                stock(self)

        return verify_equal_vocab_size_if_draft_model

    replace(EngineArgs, "create_engine_config", explaining)
    replace(SpeculativeConfig, "verify_equal_vocab_size_if_draft_model", without_trees)


def _name_method(engine_arguments: EngineArgs) -> None:
    """Name the method of a draft by its file, and say so in the log."""
    from vllm.logger import init_logger

    with reasons.logged():
        said = arguments.name_method(engine_arguments)
    if said is not None:
        init_logger("vllm.dyntree").info("%s", said)


def select_v2_runner() -> None:
    """Select the V2 runner on a CPU, for trees and for `PLAIN_WORKER`:
    ``VllmConfig.use_v2_model_runner`` and ``_validate_v2_model_runner``.

    Why: without Triton vLLM falls back to the V1 runner, and 0.32 refuses V2. Yet
    ``vllm.triton_utils.dispatcher`` accepts native kernels in place of Triton's, and the plugin's
    worker registers them. Remove when the choice of runner looks at the registered kernels.
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

    replace(VllmConfig, "use_v2_model_runner", choosing_v2)
    replace(VllmConfig, "_validate_v2_model_runner", without_triton)


def reserve_scratch_slots() -> None:
    """Reserve KV slots for the nodes that drafting expands: ``VllmConfig.num_lookahead_tokens``.

    Why: vLLM reserves one slot per draft token. A tree also expands nodes that its budget leaves
    out later, and every expanded node needs a slot in the draft's cache. Remove when a speculator
    can say how many slots it needs.
    """
    from vllm.config import VllmConfig

    from dyntree_plugin.engine import configuration

    def reserving_scratch(stock: Any) -> Any:
        def num_lookahead_tokens(self: VllmConfig) -> int:
            tokens: int = stock.fget(self)
            speculation = self.speculative_config
            if speculation is None or not configuration.is_marked(speculation):
                return tokens
            return max(tokens, configuration.scratch_slots(speculation))

        return property(num_lookahead_tokens)

    replace(VllmConfig, "num_lookahead_tokens", reserving_scratch)


def widen_compile_range() -> None:
    """Compile models for all rows of a draft forward: ``VllmConfig._set_compile_ranges``.

    Why: vLLM compiles for at most ``max_num_batched_tokens`` rows, and a forward of more fails an
    assertion. With many requests, the draft reads emitted tokens and nodes in more rows. Remove
    when a speculator can say how many rows its forwards have.
    """
    from vllm.config import VllmConfig

    from dyntree_plugin.engine import configuration

    def widening(stock: Any) -> Any:
        def set_compile_ranges(self: VllmConfig) -> None:
            stock(self)
            ends = self.compilation_config.compile_ranges_endpoints
            rows = configuration.most_draft_rows(self)
            if ends and rows > ends[-1]:
                ends[-1] = rows

        return set_compile_ranges

    replace(VllmConfig, "_set_compile_ranges", widening)


def admit_sampling_parameters() -> None:
    """Allow min-p and logit bias with trees: ``SamplingParams._validate_spec_decode``.

    Why: vLLM refuses them with any speculation, because its rejection sampler cannot serve them.
    Matching the target's samples serves them exactly. Remove when vLLM looks at the rule in
    use.
    """
    from vllm.sampling_params import SamplingParams

    from dyntree_plugin.engine import configuration

    def admitting(stock: Any) -> Any:
        @functools.wraps(stock)
        def _validate_spec_decode(self: SamplingParams, speculative_config: Any) -> None:
            if speculative_config is None or not configuration.is_marked(speculative_config):
                stock(self, speculative_config)

        return _validate_spec_decode

    replace(SamplingParams, "_validate_spec_decode", admitting)


def fit_requests() -> None:
    """Refuse requests beyond the V2 runner's sampler, and wrong limits on nodes, with trees and for
    `PLAIN_WORKER`: ``InputProcessor.process_inputs``.

    Why: vLLM checks sizes only in the worker, where an error ends the engine.
    ``SamplingParams.verify`` is too early: the tokenizer has not read the bad words yet. Remove
    when vLLM checks them.
    """
    from vllm.platforms import current_platform
    from vllm.v1.engine.input_processor import InputProcessor

    from dyntree_plugin.admission import node_limit, request_limits

    def fitting(stock: Any) -> Any:
        @functools.wraps(stock)
        def process_inputs(self: InputProcessor, *args: Any, **kwargs: Any) -> Any:
            request = stock(self, *args, **kwargs)
            params = request.sampling_params
            if params is not None and _wants_v2(self.vllm_config):
                request_limits.fit(
                    params,
                    self.model_config,
                    on_cpu=current_platform.is_cpu(),
                    adapters=self.lora_config is not None,
                )
                node_limit.check(params)
            return request

        return process_inputs

    replace(InputProcessor, "process_inputs", fitting)


def carry_tree_stats() -> None:
    """Carry the counts of trees in vLLM's statistics: ``SchedulerStats`` and
    ``PrometheusStatLogger``.

    Why: vLLM decodes statistics by their declared type, and the logger names the class of its
    speculation metrics, which vLLM itself replaces for Ray. Without trees the plugin's types add
    nothing to vLLM's. The call must precede the first engine of a process, because msgspec reads
    the declared type only once. Remove when a plugin can register statistics.
    """
    from vllm.v1.metrics.loggers import PrometheusStatLogger
    from vllm.v1.metrics.stats import SchedulerStats

    from dyntree_plugin.engine.telemetry.prometheus import TreeSpecDecodingProm
    from dyntree_plugin.engine.telemetry.stats import TreeSpecDecodingStats

    SchedulerStats.__annotations__["spec_decoding_stats"] = TreeSpecDecodingStats | None
    PrometheusStatLogger._spec_decoding_cls = TreeSpecDecodingProm


def log_drafts_alone() -> None:
    """Leave out steps that verified no draft: ``SpecDecodingLogging.observe``.

    Why: the plugin's statistics come with every step, and vLLM's log line divides by the number of
    drafts in its interval. Remove when the log line handles an interval without drafts.
    """
    from vllm.v1.spec_decode.metrics import SpecDecodingLogging

    def with_drafts(stock: Any) -> Any:
        @functools.wraps(stock)
        def observe(self: SpecDecodingLogging, spec_decoding_stats: Any) -> None:
            if spec_decoding_stats.num_drafts:
                stock(self, spec_decoding_stats)

        return observe

    replace(SpecDecodingLogging, "observe", with_drafts)


def cut_at_stop_strings() -> None:
    """Count no token after a stop string: ``OutputProcessor._update_stats_from_finished`` and
    ``update_scheduler_stats``.

    Why: vLLM counts the tokens of a step before it looks for stop strings in them. Remove when it
    counts what it returns.
    """
    from vllm.v1.engine.output_processor import OutputProcessor

    from dyntree_plugin.engine.telemetry.cut_off import CutOff

    def of(processor: Any) -> CutOff:
        found: CutOff = vars(processor).setdefault(f"_{NAMESPACE}_cut_off", CutOff())
        return found

    def ending(stock: Any) -> Any:
        @functools.wraps(stock)
        def _update_stats_from_finished(
            self: Any, req_state: Any, finish_reason: Any, iteration_stats: Any
        ) -> None:
            if iteration_stats is not None:
                of(self).ended(req_state, iteration_stats)
            stock(self, req_state, finish_reason, iteration_stats)

        return _update_stats_from_finished

    def correcting(stock: Any) -> Any:
        @functools.wraps(stock)
        def update_scheduler_stats(self: Any, scheduler_stats: Any) -> None:
            of(self).correct(getattr(scheduler_stats, "spec_decoding_stats", None))
            stock(self, scheduler_stats)

        return update_scheduler_stats

    replace(OutputProcessor, "_update_stats_from_finished", ending)
    replace(OutputProcessor, "update_scheduler_stats", correcting)


def replace(owner: type, name: str, make: Callable[[Any], Any]) -> None:
    """Set ``owner.name`` to ``make`` of the stock attribute; a second call does nothing."""
    marker = f"_{NAMESPACE}_replaced_{name}"
    if marker not in vars(owner):
        setattr(owner, marker, True)
        setattr(owner, name, make(inspect.getattr_static(owner, name)))


def _wants_v2(vllm_config: VllmConfig) -> bool:
    plain = vllm_config.parallel_config.worker_cls == PLAIN_WORKER
    return has_options(vllm_config.additional_config) or plain

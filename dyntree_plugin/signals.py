"""What it means that a process of an engine has died by a signal."""

from __future__ import annotations

import logging
import signal

_ADVICE = {
    signal.SIGILL: (
        "an instruction that this CPU or system does not allow; try --dtype float32, and report it "
        "with what `dyntree doctor` prints"
    ),
    signal.SIGKILL: (
        "most often the system, out of memory; give vLLM less with --gpu-memory-utilization or "
        "--kv-cache-memory-bytes"
    ),
}
_REPORT = "a fault of native code; report it with the log"
_LOGGER = "vllm.v1.executor.multiproc_executor"


def explain(exit_code: int | None) -> str | None:
    """Say by which signal a process died, and what to do; None if it did not die by one.

    ``exit_code``: as `multiprocessing` and `subprocess` give it, negative for a signal.
    """
    if exit_code is None or not -signal.NSIG < exit_code < 0:
        return None
    try:
        number = signal.Signals(-exit_code)
    except ValueError:
        return f"signal {-exit_code}: {_REPORT}"
    return f"signal {number.value} ({number.name}): {_ADVICE.get(number, _REPORT)}"


class _Explaining(logging.Filter):
    """Adds the explanation to vLLM's line about a worker that has died."""

    def filter(self, record: logging.LogRecord) -> bool:
        codes = [each for each in record.args or () if isinstance(each, int) and each < 0]
        if "died unexpectedly" in str(record.msg) and codes:
            record.msg = f"{record.msg} {explain(codes[-1])}"
        return True


def explain_deaths() -> None:
    """Have vLLM's log explain workers that die by a signal. A second call changes nothing."""
    logger = logging.getLogger(_LOGGER)
    if not any(isinstance(each, _Explaining) for each in logger.filters):
        logger.addFilter(_Explaining())

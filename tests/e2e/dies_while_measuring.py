"""The last rank of an engine dies while it measures or warms up.

For ``worker_extension_cls``, as ``dies_while_measuring.Extension``: vLLM imports this module in
every worker.
"""

from __future__ import annotations

import os
import signal
from typing import Any

from vllm.distributed.parallel_state import get_world_group
from vllm.v1.worker.cpu_worker import CPUWorker

from dyntree_plugin.engine import runner


class Extension:
    """Adds nothing."""


def _dying(stock: Any) -> Any:
    def die_or_go_on(*args: Any, **kwargs: Any) -> Any:
        if get_world_group().is_last_rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return stock(*args, **kwargs)

    return die_or_go_on


# The first with trees; the other is where an engine without trees runs its first steps.
runner.measure = _dying(runner.measure)
CPUWorker.compile_or_warm_up_model = _dying(CPUWorker.compile_or_warm_up_model)  # type: ignore[method-assign]

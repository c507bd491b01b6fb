"""One OpenMP thread pool for torch and numba.

numba's "omp" layer resolves the OpenMP runtime that torch has already made global (its own
libgomp, or a preloaded libiomp5), so both use the same worker threads. numba's other layers
start a second pool, whose waiting threads compete with torch's for the cores.
"""

from __future__ import annotations

import numba  # type: ignore[import-untyped]
import torch  # before the first parallel numba kernel, so that numba finds torch's OpenMP runtime

numba.config.THREADING_LAYER = "omp"

# Starting numba's threads sets OpenMP's default number of threads to the number of cores, for torch
# and every other user of OpenMP in the process. If the process may use fewer cores, each small
# kernel then waits for threads that share a core: attention of a tiny model took 1.5 ms instead of
# 20 us. So torch's number is set again.
_count = torch.get_num_threads()
numba.get_num_threads()
torch.set_num_threads(_count)

_SERIAL_OPERATIONS = 100_000  # tens of microseconds, less than a late worker thread can cost


def use_torch_threads(operations: int) -> int:
    """Set the number of threads for the numba kernels that this thread calls next, and return it.

    It is torch's number of threads, or 1 for a kernel of few `operations`: element moves or vector
    instructions, which take roughly a nanosecond each.
    """
    threads = min(torch.get_num_threads(), int(numba.config.NUMBA_NUM_THREADS))
    if operations < _SERIAL_OPERATIONS:
        threads = 1
    numba.set_num_threads(threads)
    return threads

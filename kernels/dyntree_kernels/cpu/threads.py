"""One OpenMP thread pool for torch and numba.

numba's "omp" layer resolves the OpenMP runtime that torch has already made global (its own
libgomp, or a preloaded libiomp5), so both use the same worker threads. numba's other layers
start a second pool, whose waiting threads compete with torch's for the cores.
"""

from __future__ import annotations

import numba  # type: ignore[import-untyped]
import torch  # before the first parallel numba kernel, so that its OpenMP runtime is the one found

numba.config.THREADING_LAYER = "omp"

# Starting numba's threads sets OpenMP's default count, which torch and every other OpenMP user of
# the process obey, to the number of cores. With fewer cores than that to run on, each small kernel
# then waits for threads that share a core: attention of a tiny model took 1.5 ms instead of 20 us.
_count = torch.get_num_threads()
numba.get_num_threads()
torch.set_num_threads(_count)

_SERIAL_OPERATIONS = 100_000  # tens of microseconds: less than a late worker thread can cost


def use_torch_threads(operations: int) -> int:
    """Set the number of threads of the numba kernels called next by this thread, and return it.

    It is torch's number of threads, or 1 for a kernel of few `operations` (element moves or
    vector instructions, roughly a nanosecond each).
    """
    threads = min(torch.get_num_threads(), int(numba.config.NUMBA_NUM_THREADS))
    if operations < _SERIAL_OPERATIONS:
        threads = 1
    numba.set_num_threads(threads)
    return threads

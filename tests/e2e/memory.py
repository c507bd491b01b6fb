"""The memory of a process and its child processes over time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil

MIB = 1 << 20


@dataclass
class Samples:
    """By the name of a process: pairs of seconds since the first sample, and MiB."""

    of: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def growth(self, warm_up: float) -> dict[str, float]:
        """Return the MiB that each process gained after ``warm_up`` seconds.

        It is the difference between the medians of the last and the first third of that time.
        """
        found = {}
        for name, samples in self.of.items():
            sizes = [size for at, size in samples if at >= warm_up]
            third = len(sizes) // 3
            if third:
                found[name] = median(sizes[-third:]) - median(sizes[:third])
        return found

    def table(self, rows: int = 12) -> str:
        """Return a table of minutes and the MiB of each process."""
        names = sorted(self.of)
        lines = ["minute " + " ".join(f"{name:>24}" for name in names)]
        count = max((len(samples) for samples in self.of.values()), default=0)
        for row in range(0, count, max(1, count // rows)):
            cells = [self.of[name][row] for name in names if row < len(self.of[name])]
            if len(cells) == len(names):
                sizes = " ".join(f"{size:24.1f}" for _, size in cells)
                lines.append(f"{cells[0][0] / 60:6.1f} {sizes}")
        return "\n".join(lines)


def private(pid: int) -> float:
    """Return the process's proportional share (PSS) of the memory that it has mapped, in MiB."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024 / MIB
    raise RuntimeError(f"no Pss of process {pid}")


def processes(pid: int) -> dict[str, int]:
    """Return a process and all its child processes, by name."""
    found: dict[str, int] = {}
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        with suppress(psutil.Error):
            # vLLM gives its processes such titles.
            title = " ".join(process.cmdline()).strip()
            name = title if title.startswith("VLLM") else process.name()
            name = "API server" if process is root else name
            found[name if name not in found else f"{name} {process.pid}"] = process.pid
    return found


@contextmanager
def watched(pid: int, every: float = 5.0) -> Iterator[Samples]:
    """Sample the memory of a process and its child processes while the block runs."""
    samples = Samples()
    names = processes(pid)
    done = threading.Event()
    began = time.monotonic()

    def watch() -> None:
        while True:
            for name, each in names.items():
                with suppress(OSError):
                    at = time.monotonic() - began
                    samples.of.setdefault(name, []).append((at, private(each)))
            if done.wait(every):
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        done.set()
        thread.join()

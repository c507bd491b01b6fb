"""Fixtures and pytest hooks for all tests."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # Tests run side by side. With a thread for every core in each of them, threads would wait for
    # others that do not run; and vLLM would bind them to the same cores.
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
if os.environ.get("TRITON_INTERPRET") == "1":
    from quick_interpreter import quicken

    quicken()

FIGURE = "figure"
"""Name of the report property that holds a test's measured figures."""

SHARING = {
    **dict.fromkeys(
        (
            "test_asynchronous",
            "test_delivered",
            "test_drawn_rules",
            "test_grammars",
            "test_identity",
            "test_metrics",
            "test_node_limit",
            "test_pipeline",
            "test_ranking",
            "test_sources",
            "test_tensor_parallel",
        ),
        "shared engines",
    ),
    **dict.fromkeys(
        ("test_examples", "test_readme", "test_serve_benchmark", "test_server"), "shared server"
    ),
}
"""Modules that use the engines, or the server, of tests/e2e/conftest.py, by what they share. Each
starts once per process."""

TINY_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Let PyTorch compute in one thread: sums have the same order for any number of rows, and tiny
    tensors do not wait for threads that do not run."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show the figures that tests measured, including tests in other processes."""
    reports = [r for outcome in ("passed", "failed") for r in terminalreporter.getreports(outcome)]
    told = [v for r in reports if r.when == "call" for k, v in r.user_properties if k == FIGURE]
    if told:
        terminalreporter.section("figures")
    for text in told:
        terminalreporter.line(str(text))
    ran, others = cpu_paths()
    terminalreporter.line(
        f"This CPU ran the code for {', '.join(ran)}; it cannot run that for "
        f"{', '.join(others) or 'no other'} (docs/compatibility.md)."
    )


def cpu_paths() -> tuple[list[str], list[str]]:
    """Return the kinds of x86 code that libraries select on this machine, and those that they do
    not. With AVX-512 they select nothing of AVX2's."""
    import torch

    has = torch.cpu.get_capabilities()
    widest = "AVX-512" if has.get("avx512_f") else "AVX2"
    paths = {
        "AVX2": widest == "AVX2",
        "AVX-512": widest == "AVX-512",
        "BF16": has.get("avx512_bf16", False),
        "AMX": has.get("amx_tile", False),
    }
    return [name for name, ran in paths.items() if ran], [n for n, ran in paths.items() if not ran]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadfile``, run all modules that share something in one process."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByWhatIsShared(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            module: str = super()._split_scope(nodeid)
            return SHARING.get(Path(module).stem, module)

    return ByWhatIsShared(config, log)


@pytest.fixture
def tell(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Return a function that adds a measured figure to the end of pytest's output."""
    return lambda text: record_property(FIGURE, text)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Return a function that makes a model folder without weights.

    Its configuration is a tiny Llama; keyword arguments change it.
    """

    def make(name: str = "model", **changes: Any) -> str:
        folder: Path = tmp_path_factory.mktemp(name)
        (folder / "config.json").write_text(json.dumps(TINY_LLAMA | changes))
        return str(folder)

    return make


@pytest.fixture
def environment() -> Iterator[None]:
    """Restore the environment variables that vLLM sets while it checks a configuration."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)

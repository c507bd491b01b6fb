"""Modules import in one direction: there is no cycle, and nothing imports a higher layer.

Imports are read from the sources, so imports within functions and for type checkers count as well.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

LAYERS = (
    ("dyntree_kernels",),
    ("vllm_cpu_runner",),
    # These belong to no engine. Two packages are listed here without their modules.
    (
        "dyntree_plugin",
        "dyntree_plugin.engine",
        "dyntree_plugin.escape",
        "dyntree_plugin.secrets",
        "dyntree_plugin.amx",
        "dyntree_plugin.signals",
        "dyntree_plugin.strict_json",
        "dyntree_plugin.provenance",
        "dyntree_plugin.pair",
    ),
    ("dyntree_plugin.tree",),
    ("dyntree_plugin.tune",),
    ("dyntree_plugin.options", "dyntree_plugin.metrics"),
    ("dyntree_plugin.admission",),
    ("dyntree_plugin.openmp",),
    (
        "dyntree_plugin.engine.configuration",
        "dyntree_plugin.engine.fallback",
        "dyntree_plugin.engine.offloading",
        "dyntree_plugin.engine.layer_kinds",
        "dyntree_plugin.engine.checked_layers",
        "dyntree_plugin.engine.rounding",
        "dyntree_plugin.engine.attention",
        "dyntree_plugin.engine.states",
    ),
    (
        "dyntree_plugin.engine.step",
        "dyntree_plugin.engine.papers",
        "dyntree_plugin.engine.drawn",
        "dyntree_plugin.engine.sampling",
    ),
    (
        "dyntree_plugin.engine.telemetry",
        "dyntree_plugin.engine.budget",
        "dyntree_plugin.engine.start",
        "dyntree_plugin.engine.grammar",
    ),
    (
        "dyntree_plugin.engine.adapters",
        "dyntree_plugin.engine.agreement",
        "dyntree_plugin.engine.compose",
        "dyntree_plugin.engine.earlier_stage",
        "dyntree_plugin.engine.drafts",
        "dyntree_plugin.engine.pipeline",
        "dyntree_plugin.engine.runner",
        "dyntree_plugin.engine.scheduler",
        "dyntree_plugin.engine.stage",
        "dyntree_plugin.engine.patches",
        "dyntree_plugin.engine.numba_first",
        "dyntree_plugin.engine.worker",
    ),
    ("dyntree_plugin.engine.cpu", "dyntree_plugin.engine.cuda"),
    ("dyntree_plugin.plugin",),
    ("dyntree_plugin.commands",),
    ("dyntree_plugin.cli",),
    ("benchmarks", "scripts"),
)
"""Modules and packages from the lowest layer up. A module may import its own layer and lower
ones."""

OPEN = ("dyntree_plugin", "dyntree_plugin.engine")
"""Packages whose modules have layers of their own."""

WITHOUT_VLLM = (
    "dyntree_kernels",
    "dyntree_plugin.tree",
    "dyntree_plugin.options",
    "dyntree_plugin.metrics",
    "dyntree_plugin.pair",
    "dyntree_plugin.tune",
)

COMMANDS = ("bench", "dashboards", "demo", "doctor", "show", "top", "tune")
"""Packages of commands. Code that several of them share lies next to them."""

Sources = Mapping[str, str]
Imports = Mapping[str, frozenset[str]]


def sources() -> dict[str, str]:
    """Return the source of every module by its name."""
    found = {}
    for package in ("kernels/dyntree_kernels", "kernels/vllm_cpu_runner", "dyntree_plugin",
                    "benchmarks", "scripts"):  # fmt: skip
        folder = REPOSITORY / package
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder.parent).with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = path.read_text("utf-8")
    return found


@cache
def names(source: str) -> frozenset[str]:
    """Return every name that a source imports: of modules, and of objects that may be modules."""
    return frozenset(_names(source))


def _names(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError("a relative import: its name does not say what it imports")
            yield from (f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (str(each.value) for each in node.args if isinstance(each, ast.Constant))


def imports(modules: Sources) -> dict[str, frozenset[str]]:
    """Return, for each module, those of ``modules`` that it imports.

    An import also runs the packages that contain the module, unless they contain the importer too.
    """
    found = {}
    for module, source in modules.items():
        imported: set[str] = set()
        for name in names(source):
            parts = name.split(".")
            there = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
            there = [each for each in there if each in modules]
            imported |= {each for each in there if not f"{module}.".startswith(f"{each}.")}
            imported |= {*there[-1:]}
        found[module] = frozenset(imported - {module})
    return found


def layer(module: str) -> int:
    """Return the number of a module's layer. The longest matching name counts."""
    fitting = [
        (len(name), number)
        for number, layer in enumerate(LAYERS)
        for name in layer
        if module == name or (name not in OPEN and module.startswith(f"{name}."))
    ]
    if not fitting:
        raise ValueError(f"{module} belongs to no layer")
    return max(fitting)[1]


def upward(edges: Imports) -> list[str]:
    """Return the imports of higher layers."""
    return [
        f"{module} imports {each}"
        for module, imported in edges.items()
        for each in sorted(imported)
        if layer(each) > layer(module)
    ]


def circle(edges: Imports) -> list[str]:
    """Return the modules of one import cycle, or an empty list."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def across_commands(edges: Imports) -> list[str]:
    """Return the imports of one command's package by another's."""
    prefixes = [f"dyntree_plugin.commands.{name}." for name in COMMANDS]
    return [
        f"{module} imports {each}"
        for module, imported in edges.items()
        for each in sorted(imported)
        for prefix in prefixes
        if module.startswith(tuple(prefixes))
        and f"{each}.".startswith(prefix)
        and not f"{module}.".startswith(prefix)
    ]


def of_vllm(modules: Sources) -> list[str]:
    """Return the modules that import vLLM and must not."""
    return [
        module
        for module, source in modules.items()
        if f"{module}.".startswith(tuple(f"{each}." for each in WITHOUT_VLLM))
        and any(name.split(".")[0] == "vllm" for name in names(source))
    ]


@pytest.fixture(scope="module")
def modules() -> dict[str, str]:
    return sources()


def test_there_is_no_circle(modules: Sources) -> None:
    assert circle(imports(modules)) == []


def test_nothing_imports_a_higher_layer(modules: Sources) -> None:
    assert upward(imports(modules)) == []


def test_a_command_imports_no_other_command(modules: Sources) -> None:
    assert across_commands(imports(modules)) == []


def test_kernels_trees_options_metrics_and_the_pair_do_without_vllm(modules: Sources) -> None:
    assert of_vllm(modules) == []


@pytest.mark.parametrize(
    "line",
    [
        "from dyntree_plugin.engine import patches",
        "from dyntree_plugin.engine.patches import FLAG",
        "import dyntree_plugin.engine.patches",
        "if TYPE_CHECKING:\n    from dyntree_plugin.engine.patches import FLAG",
        "def late():\n    from dyntree_plugin.engine import patches",
        "importlib.import_module('dyntree_plugin.engine.patches')",
    ],
)
def test_a_circle_and_an_upward_import_are_found_however_they_are_written(
    modules: Sources, line: str
) -> None:
    changed = {**modules, "dyntree_plugin.options.options": line}
    assert upward(imports(changed)) == [
        "dyntree_plugin.options.options imports dyntree_plugin.engine.patches"
    ]
    assert {"dyntree_plugin.options.options", "dyntree_plugin.engine.patches"} <= {
        *circle(imports(changed))
    }


def test_an_import_of_a_packages_own_module_counts(modules: Sources) -> None:
    package = "dyntree_plugin.commands.demo"
    changed = {
        **modules,
        package: f"from {package}.command import demo",
        f"{package}.command": f"from {package} import app",
    }
    assert {package, f"{package}.command"} == {*circle(imports(changed))}


@pytest.mark.parametrize("commands", [("show", "demo"), ("doctor", "top")])
def test_an_import_of_another_command_is_found(modules: Sources, commands: tuple[str, str]) -> None:
    one, other = (f"dyntree_plugin.commands.{name}" for name in commands)
    changed = {**modules, f"{one}.command": f"from {other}.screen import show"}
    assert across_commands(imports(changed)) != []


def test_an_import_of_vllm_is_found(modules: Sources) -> None:
    changed = {**modules, "dyntree_plugin.tree.plan": "def f():\n    from vllm import LLM"}
    assert of_vllm(changed) == ["dyntree_plugin.tree.plan"]


def test_a_module_of_no_layer_is_refused(modules: Sources) -> None:
    source = "from dyntree_plugin import options"
    with pytest.raises(ValueError, match="new belongs to no layer"):
        upward(imports({**modules, "dyntree_plugin.new": source}))


def test_a_relative_import_is_refused() -> None:
    with pytest.raises(ValueError, match="relative"):
        list(names("from . import other"))

"""Find code that waits for the device, as far as a syntax tree shows it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

WAITING = {
    "item", "tolist", "cpu", "numpy", "nonzero", "argwhere", "synchronize", "masked_select",
    "unique", "unique_consecutive", "bincount", "equal", "allclose", "is_nonzero",
}  # fmt: skip
"""Methods of tensors and functions of torch that wait."""
BUILTINS = {"int", "float", "bool", "range", "min", "max"}
"""Builtins that read a tensor's value."""
ON_THE_HOST = ("_np", "_cpu_upper_bound")
"""Suffixes of vLLM's names for data on the host."""
EXCUSE = "# sync:"
"""Marks a line that may wait, and says why."""

_NO_TENSORS = {
    "shape", "dtype", "device", "ndim", "is_cuda", "itemsize", "nbytes", "size", "dim", "numel",
    "stride", "element_size", "data_ptr", "is_contiguous", "storage_offset", "untyped_storage",
    "get_device", "is_floating_point", "names",
}  # fmt: skip
"""Attributes of a tensor that are not tensors."""
_MADE_BY_TORCH = {
    "arange", "as_tensor", "bitwise_and", "bitwise_or", "cat", "clamp", "cumsum", "diff", "empty",
    "empty_like", "full", "full_like", "gather", "isin", "isnan", "logical_and", "logical_not",
    "logical_or", "maximum", "minimum", "ones", "ones_like", "searchsorted", "stack", "tensor",
    "where", "zeros", "zeros_like",
}  # fmt: skip
_MASKS = {"isin", "isnan", "logical_and", "logical_not", "logical_or", "bool", "eq", "ne", "gt"}
_ON_A_MASK = {"view", "flatten", "reshape", "expand", "clone", "any", "all", "unsqueeze"}


@dataclass(frozen=True)
class Declared:
    """Names of attributes that are tensors in every class, and of functions that return one."""

    attributes: frozenset[str] = frozenset()
    functions: frozenset[str] = frozenset()


def waiting(source: str, declared: Declared) -> list[str]:
    """Return the lines that wait for the device, without those that are marked."""
    lines = source.splitlines()
    tree = ast.parse(source)
    found = {node.lineno for node in _calls(tree)}
    for function in _functions(tree):
        found |= {node.lineno for node in _Function(function, declared).waits()}
    return [
        f"line {number}: {lines[number - 1].strip()}"
        for number in sorted(found)
        if EXCUSE not in lines[number - 1]
    ]


def declarations(sources: Iterable[str]) -> Declared:
    attributes: dict[str, bool] = {}
    functions: dict[str, bool] = {}

    def note(names: dict[str, bool], name: str, tensor: bool) -> None:
        names[name] = names.get(name, True) and tensor

    for tree in map(ast.parse, sources):
        for node in ast.walk(tree):
            if isinstance(node, ast.AnnAssign):
                note(attributes, _name(node.target), _is_tensor(node.annotation))
            elif isinstance(node, ast.FunctionDef):
                is_property = any("property" in ast.unparse(d) for d in node.decorator_list)
                note(attributes if is_property else functions, node.name, _is_tensor(node.returns))
        for function in _functions(tree):
            local = _Function(function, Declared())
            for target, value in local.attributes():
                note(attributes, target, local.tensor(value))
    return Declared(*(frozenset(n for n in names if names[n]) for names in (attributes, functions)))


def _name(target: ast.expr) -> str:
    return str(getattr(target, "id", getattr(target, "attr", "")))


def _is_tensor(annotation: ast.expr | None) -> bool:
    return annotation is not None and ast.unparse(annotation) == "torch.Tensor"


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    """Yield calls that wait, whatever they are called on."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        owner, name = ast.unparse(node.func.value), node.func.attr
        to_host = name == "to" and _names_the_host(node) and "non_blocking=True" not in _text(node)
        nonzero = owner == "torch" and name == "where" and len(node.args) == 1
        on_host = owner == "np" or owner.endswith(ON_THE_HOST)
        if (name in WAITING or to_host or nonzero) and not on_host:
            yield node


def _text(call: ast.Call) -> str:
    return ", ".join(ast.unparse(part) for part in (*call.args, *call.keywords))


def _names_the_host(call: ast.Call) -> bool:
    return "'cpu'" in _text(call)


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """Yield methods and outermost functions. A nested function belongs to the one around it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield node
        else:
            yield from _functions(node)


@dataclass(frozen=True)
class _Function:
    """A function. A local name is a tensor if every value that it is bound to is one."""

    node: ast.FunctionDef
    declared: Declared

    def attributes(self) -> Iterator[tuple[str, ast.expr | None]]:
        """Yield assigned attributes and their values; None for an unknown value."""
        for node in ast.walk(self.node):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Attribute):
                        yield target.attr, node.value
                    elif isinstance(target, ast.Tuple):
                        attributes = (x for x in target.elts if isinstance(x, ast.Attribute))
                        yield from ((each.attr, None) for each in attributes)

    @cached_property
    def _given(self) -> dict[str, list[ast.expr | None]]:
        """The values that local names are bound to; None for an unknown value."""
        given: dict[str, list[ast.expr | None]] = {}

        def bind(target: ast.expr, value: ast.expr | None) -> None:
            if isinstance(target, ast.Name):
                given.setdefault(target.id, []).append(value)
            elif isinstance(target, ast.Tuple | ast.List):
                same = isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts)
                parts = value.elts if same and isinstance(value, ast.Tuple) else [None] * 99
                for part, of_value in zip(target.elts, parts, strict=False):
                    bind(part, of_value)
            elif isinstance(target, ast.Starred):
                bind(target.value, None)

        for node in ast.walk(self.node):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    bind(target, node.value)
            elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
                bind(node.target, node.value)
            elif isinstance(node, ast.arg):
                tensor = _is_tensor(node.annotation)
                given.setdefault(node.arg, []).append(node.annotation if tensor else None)
            elif isinstance(node, ast.For | ast.comprehension):
                bind(node.target, None)
            elif isinstance(node, ast.withitem) and node.optional_vars is not None:
                bind(node.optional_vars, None)
        return given

    def tensor(self, node: ast.expr | None, seen: frozenset[str] = frozenset()) -> bool:
        """Return whether the expression is certainly a tensor."""
        if isinstance(node, ast.Name):
            values = self._given.get(node.id)
            if values is None or node.id in seen:
                return node.id in seen
            return all(self.tensor(value, seen | {node.id}) for value in values)
        if isinstance(node, ast.Attribute):
            if _is_tensor(node):
                return True  # a parameter's annotation
            of_tensor = self.tensor(node.value, seen) and node.attr in {"T", "mT"}
            return of_tensor or node.attr in self.declared.attributes
        if isinstance(node, ast.Call):
            return self._returns_tensor(node, seen)
        if isinstance(node, ast.Subscript):
            return self.tensor(node.value, seen)
        if isinstance(node, ast.BinOp):
            return self.tensor(node.left, seen) or self.tensor(node.right, seen)
        if isinstance(node, ast.UnaryOp):
            return not isinstance(node.op, ast.Not) and self.tensor(node.operand, seen)
        if isinstance(node, ast.Compare):
            values = [node.left, *node.comparators]
            identity = any(isinstance(op, ast.Is | ast.IsNot) for op in node.ops)
            return not identity and any(self.tensor(value, seen) for value in values)
        if isinstance(node, ast.IfExp):
            return self.tensor(node.body, seen) and self.tensor(node.orelse, seen)
        return False

    def _returns_tensor(self, call: ast.Call, seen: frozenset[str]) -> bool:
        if isinstance(call.func, ast.Name):
            return call.func.id in self.declared.functions
        if not isinstance(call.func, ast.Attribute):
            return False
        name, owner = call.func.attr, call.func.value
        if _name(owner) == "np":
            return False
        if _name(owner) == "torch":
            return name in _MADE_BY_TORCH and not _names_the_host(call)
        # With a dimension, they return values and indices.
        pair = name in {"sort", "topk"} or (name in {"max", "min", "median"} and _text(call) != "")
        others = _NO_TENSORS | WAITING | {"chunk", "split", "unbind"}
        of_tensor = not pair and name not in others and self.tensor(owner, seen)
        return of_tensor or name in self.declared.functions

    def mask(self, node: ast.expr, seen: frozenset[str] = frozenset()) -> bool:
        """Return whether the expression is certainly a tensor of truth values."""
        if isinstance(node, ast.Compare):
            return self.tensor(node)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
            return self.mask(node.operand, seen)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitOr):
            return self.mask(node.left, seen) or self.mask(node.right, seen)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = node.func.attr
            made = name in _MASKS and self.tensor(node)
            return made or (name in _ON_A_MASK and self.mask(node.func.value, seen))
        if isinstance(node, ast.Name) and node.id not in seen:
            values = self._given.get(node.id) or [None]
            return all(v is not None and self.mask(v, seen | {node.id}) for v in values)
        return False

    def waits(self) -> Iterator[ast.expr]:
        """Yield the expressions that read a tensor's value."""
        for node in ast.walk(self.node):
            if isinstance(node, ast.Call):
                yield from self._of_call(node)
            elif isinstance(node, ast.If | ast.While | ast.IfExp):
                yield from self._truths(node.test)
            elif isinstance(node, ast.comprehension):
                yield from (found for test in node.ifs for found in self._truths(test))
            elif isinstance(node, ast.Subscript):
                yield from self._of_index(node)

    def _of_call(self, node: ast.Call) -> Iterator[ast.expr]:
        name = _name(node.func)
        if isinstance(node.func, ast.Name) and name in BUILTINS:
            yield from filter(self.tensor, node.args)
        elif name == "repeat_interleave" and "output_size" not in _text(node):
            # Without it, the values of a tensor of repeats determine the length of the result.
            repeats = node.args[1:] if ast.unparse(node.func).startswith("torch.") else node.args
            yield from filter(self.tensor, repeats)

    def _truths(self, test: ast.expr) -> Iterator[ast.expr]:
        if isinstance(test, ast.BoolOp):
            yield from (found for value in test.values for found in self._truths(value))
        elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            yield from self._truths(test.operand)
        elif self.tensor(test):
            yield test

    def _of_index(self, node: ast.Subscript) -> Iterator[ast.expr]:
        if not self.tensor(node.value):
            return
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        for part in parts:
            if isinstance(part, ast.Slice):
                bounds = (part.lower, part.upper, part.step)
                yield from (bound for bound in bounds if bound is not None and self.tensor(bound))
            elif self.mask(part):
                yield part

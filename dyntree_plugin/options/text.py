"""Describe an option: its purpose, its allowed values and its default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, overload

from pydantic.fields import FieldInfo

if TYPE_CHECKING:
    from dyntree_plugin.tree.growth.base import GrowthSpec
    from dyntree_plugin.tree.rule import RuleSpec


@overload
def specs(option: Literal["growth"]) -> Mapping[str, GrowthSpec]: ...
@overload
def specs(option: Literal["rule"]) -> Mapping[str, RuleSpec]: ...
@overload
def specs(option: str) -> Mapping[str, GrowthSpec | RuleSpec]: ...
def specs(option: str) -> Mapping[str, Any]:
    """Return the growths or rules that ``option`` chooses from; {} for other options."""
    if option not in ("growth", "rule"):
        return {}
    from dyntree_plugin.tree.registry import GROWTHS, RULES

    return GROWTHS if option == "growth" else RULES


def meaning(name: str, field: FieldInfo) -> str:
    """Return an option's description; for ``growth`` or ``rule``, with one of each value."""
    verb = {"growth": "grows", "rule": "is"}.get(name)
    each = "; ".join(f"{spec.name} {verb} {spec.summary}" for spec in specs(name).values())
    return f"{field.description} {each}." if each else str(field.description)


def allowed(name: str, field: FieldInfo) -> str:
    """Return the values that an option takes."""
    if known := specs(name):
        return " or ".join(known)
    type_ = next((t for t in get_args(field.annotation) if get_origin(t)), field.annotation)
    if get_origin(type_) is Literal:
        return " or ".join(str(value) for value in get_args(type_))
    if get_origin(type_) is tuple:
        kinds = {
            int: "integers >= 1",
            float: "numbers from 0 to 1",
            str: "folders or names of models",
        }
        of_what = kinds[get_args(get_args(type_)[0])[0]]
        most = next(m.max_length for m in field.metadata if hasattr(m, "max_length"))
        return f"a list of 1 to {most} {of_what}"
    if str in get_args(field.annotation):
        return "the path of a file"
    if type_ is float or float in get_args(type_):
        return "a number above 0, at most 1"
    low = next(m.ge for m in field.metadata if hasattr(m, "ge"))
    high = next(m.le for m in field.metadata if hasattr(m, "le"))
    return f"an integer from {low} to {high}"


def default_of(field: FieldInfo) -> str:
    """Return an option's default, or what it follows from."""
    extra = field.json_schema_extra
    return str(extra["derived"] if isinstance(extra, dict) else field.default)

"""Launch configurations as JSON, derived from the fields of their dataclasses."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from typing import Any, TypeVar

from moe_core.errors import ConfigError
from moe_core.kernels.gemm.plan import GemvPlan, TilePlan

#: plan classes, keyed by the name of their kind in a file
KINDS: dict[str, type[Any]] = {"tiles": TilePlan, "gemv": GemvPlan}
T = TypeVar("T")


def plan_to_json(plan: TilePlan | GemvPlan) -> dict[str, Any]:
    """Convert a plan, with its kind, to a dictionary that :func:`plan_from_json` reads.

    Args:
        plan: The plan.

    Returns:
        JSON-ready dictionary.
    """
    kind = next(name for name, cls in KINDS.items() if isinstance(plan, cls))
    return {"kind": kind, **asdict(plan)}


def plan_from_json(data: object, where: str) -> TilePlan | GemvPlan:
    """Convert JSON data to a plan.

    Args:
        data: Parsed JSON.
        where: Location of the data, for messages.

    Returns:
        The plan.

    Raises:
        ConfigError: If the data is not a valid plan.
    """
    kind = data.get("kind") if isinstance(data, Mapping) else None
    # lists and objects are not hashable
    if not isinstance(data, Mapping) or not isinstance(kind, str) or kind not in KINDS:
        raise ConfigError(f"{where} is {str(data)[:80]!r}, expected a plan of the kind {' or '.join(KINDS)}")
    rest = {name: value for name, value in data.items() if name != "kind"}
    plan: TilePlan | GemvPlan = from_json(KINDS[kind], rest, where)
    return plan


def from_json(cls: type[T], data: object, where: str) -> T:
    """Convert JSON data to a dataclass of numbers, strings and such dataclasses, by field names.

    Fields with defaults may be missing.

    Args:
        cls: The dataclass.
        data: Parsed JSON.
        where: Location of the data, for messages.

    Returns:
        An instance of ``cls``.

    Raises:
        ConfigError: If a field is unknown, missing, or of another type.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where} is {str(data)[:80]!r}, expected an object")
    known = {field.name: field for field in fields(cls)}  # type: ignore[arg-type]
    unknown = [name for name in data if name not in known]
    if unknown:
        raise ConfigError(f"{where}.{str(unknown[0])[:80]} is not known; known: {', '.join(known)}")
    types = typing.get_type_hints(cls)
    made = {}
    for name, field in known.items():
        if name in data:
            made[name] = _value(types[name], data[name], f"{where}.{name}")
        elif field.default is MISSING:
            raise ConfigError(f"{where}.{name} is missing")
    return cls(**made)


def _value(wanted: Any, value: object, where: str) -> Any:
    if is_dataclass(wanted):
        return from_json(wanted, value, where)  # type: ignore[arg-type]
    choices = typing.get_args(wanted)
    if typing.get_origin(wanted) is typing.Literal:
        if value not in choices:
            raise ConfigError(f"{where} is {str(value)[:80]!r}, expected one of {', '.join(map(str, choices))}")
        return value
    # bool is a subclass of int in Python, but not a number in JSON
    if not isinstance(value, wanted) or isinstance(value, bool) != (wanted is bool):
        raise ConfigError(f"{where} is {str(value)[:80]!r}, expected {wanted.__name__}")
    return value

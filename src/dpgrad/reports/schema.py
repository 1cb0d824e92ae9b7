"""The part of JSON Schema that the format of a report needs: types, bounds, choices, and what must and may be there."""

from collections.abc import Iterator
from typing import Any

__all__ = ["faults"]

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "null": (type(None),),
}


def faults(value: Any, schema: dict[str, Any], at: str = "report") -> Iterator[str]:
    """Where ``value`` differs from ``schema``, one line each; nothing where it does not.

    >>> list(faults({"steps": -1}, {"type": "object", "properties": {"steps": {"type": "integer", "minimum": 0}}}))
    ['report.steps must be at least 0']
    """
    kinds = schema.get("type", list(_TYPES))
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not any(_is(value, kind) for kind in kinds):
        yield f"{at} must be of type {' or '.join(kinds)}"
    elif "enum" in schema and value not in schema["enum"]:
        yield f"{at} must be one of {', '.join(map(str, schema['enum']))}"
    elif isinstance(value, dict):
        yield from _fields(value, schema, at)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from faults(item, schema.get("items", {}), f"{at}[{number}]")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield from _bounds(value, schema, at)


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _fields(value: dict[str, Any], schema: dict[str, Any], at: str) -> Iterator[str]:
    known = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{at}.{name} is missing"
    for name, item in value.items():
        if name in known:
            yield from faults(item, known[name], f"{at}.{name}")
        elif schema.get("additionalProperties") is False:
            yield f"{at}.{name} is not known"


def _bounds(value: float, schema: dict[str, Any], at: str) -> Iterator[str]:
    if value < schema.get("minimum", value):
        yield f"{at} must be at least {schema['minimum']}"
    if "exclusiveMinimum" in schema and value <= schema["exclusiveMinimum"]:
        yield f"{at} must be above {schema['exclusiveMinimum']}"
    if "exclusiveMaximum" in schema and value >= schema["exclusiveMaximum"]:
        yield f"{at} must be below {schema['exclusiveMaximum']}"

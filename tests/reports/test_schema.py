"""The checker of the report's format finds every kind of fault, and only those."""

from typing import Any

import pytest

from dpgrad.reports.report import faults

SCHEMA = {
    "type": "object",
    "required": ["a"],
    "additionalProperties": False,
    "properties": {
        "a": {"type": ["number", "null"], "minimum": 0, "exclusiveMaximum": 2},
        "b": {"type": "array", "items": {"type": "string", "enum": ["x", "y"]}},
        "c": {"type": "number", "exclusiveMinimum": 0},
        "d": {"type": "boolean"},
        "e": {"type": "integer"},
    },
}


@pytest.mark.parametrize("value", [{"a": 0}, {"a": None, "b": ["x", "y"], "c": 0.1, "d": True, "e": 3}])
def test_good(value: Any) -> None:
    assert list(faults(value, SCHEMA)) == []


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ([], "report must be of type object"),
        ({}, "report.a is missing"),
        ({"a": "1"}, "report.a must be of type number or null"),
        ({"a": True}, "report.a must be of type number or null"),
        ({"a": -1}, "report.a must be at least 0"),
        ({"a": 2}, "report.a must be below 2"),
        ({"a": 1, "b": ["x", "z"]}, "report.b[1] must be one of x, y"),
        ({"a": 1, "c": 0}, "report.c must be above 0"),
        ({"a": 1, "d": 1}, "report.d must be of type boolean"),
        ({"a": 1, "e": 1.5}, "report.e must be of type integer"),
        ({"a": 1, "f": 1}, "report.f is not known"),
    ],
    ids=str,
)
def test_fault(value: Any, fault: str) -> None:
    assert list(faults(value, SCHEMA)) == [fault]

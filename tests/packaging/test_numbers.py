"""docs/numbers.csv lists the numbers that influence a decision, with the values of the code."""

from __future__ import annotations

import csv
import importlib
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from healcore.policy import load, to_dict

with (Path(__file__).parents[2] / "docs" / "numbers.csv").open() as _file:
    ROWS = [row[:3] for row in csv.reader(_file)][1:]


def in_code(place: str) -> Any:
    """The value at `module:NAME` or `module:Class.field`, or at a key of the policy `default`."""
    if ":" in place:
        module, _, path = place.partition(":")
        found: Any = importlib.import_module(module)
        for name in path.split("."):
            defaults = getattr(found, "_field_defaults", {})
            found = defaults[name] if name in defaults else getattr(found, name)
        return found
    found = to_dict(load("default"))
    for key in place.split("."):
        found = found[int(key)] if isinstance(found, list) else found[key]
    return found


@pytest.mark.parametrize(("name", "value", "place"), ROWS)
def test_value(name: str, value: str, place: str):
    assert float(Fraction(value)) == pytest.approx(float(in_code(place)), rel=1e-9), name

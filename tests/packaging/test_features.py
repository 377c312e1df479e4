"""The tests that tests/README.md names exist; docs/numbers.csv has the numbers of the code."""

import csv
import importlib
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from healcore.policy import load, to_dict

TESTS = Path(__file__).parents[1]
PAGE = (TESTS / "README.md").read_text().partition("## A feature, and the test")[2]
FEATURES = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", PAGE, re.M)
TEST = re.compile(r"`tests/([\w/]+\.py)::(test_\w+)`")


def exists(file: str, name: str) -> bool:
    path = TESTS / file
    return path.is_file() and bool(re.search(rf"^def {name}\(", path.read_text(), re.M))


def test_every_named_test_exists_and_every_feature_has_a_test_or_says_so():
    named = [each for _, cell in FEATURES for each in TEST.findall(cell)]
    assert len(named) > 100
    assert [each for each in named if not exists(*each)] == []
    other = [feature for feature, cell in FEATURES if not TEST.search(cell)]
    others = ("test", "---", "no test", "`make")
    cells = dict(FEATURES)
    assert [each for each in other if not cells[each].startswith(others)] == []


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


def test_the_numbers_are_those_of_the_code():
    for name, value, place in ROWS:
        assert float(Fraction(value)) == pytest.approx(float(in_code(place)), rel=1e-9), name

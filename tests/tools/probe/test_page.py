"""docs/probes.md names the checks and bounds of the probes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from healcore.tools.probe.inputs import LOSS_CHECKS, LossInputs, OptimizerInputs, read_spec
from healcore.tools.probe.result import ProbeVerdict

PAGE = (Path(__file__).parents[3] / "docs" / "probes.md").read_text()


def test_every_check_of_the_curve_has_a_row():
    section = PAGE.partition("## The loss curve")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\w[\w ]*) \|", section, re.M)[1:]
    assert [row.replace(" ", "_") for row in rows] == list(LOSS_CHECKS)


def test_the_bounds_are_the_defaults():
    bounds = re.findall(r"`--([\w-]+) ([\d.-]+)`", PAGE)
    inputs = {**LossInputs().model_dump(), **OptimizerInputs().model_dump()}
    bounds = [(name.replace("-", "_"), float(value)) for name, value in bounds]
    assert len(bounds) >= 15
    assert [each for each in bounds if each[0] != "step" and inputs[each[0]] != each[1]] == []


@pytest.mark.parametrize("verdict", ProbeVerdict)
def test_the_exit_statuses(verdict):
    assert f"| `{verdict.name}` | {verdict.exit_code} |" in PAGE


def test_the_spec_is_read(tmp_path):
    (block,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.M | re.S)
    spec = tmp_path / "spec.toml"
    spec.write_text(block)
    assert LossInputs(**read_spec(spec)).weights

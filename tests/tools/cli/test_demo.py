"""`healcore demo`: options and exit status; training and output are in tests/tools/test_demo.py."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from healcore.tools.cli import app


def demo(*args: object):
    return CliRunner().invoke(app, ["demo", *map(str, args)])


@pytest.mark.parametrize("wrong", [["--framework", "tensorflow"], ["--steps", "5"]])
def test_a_wrong_option_exits_with_2(wrong, tmp_path):
    assert demo(*wrong, "--out", tmp_path / "new").exit_code == 2
    assert not list(tmp_path.iterdir())


def test_the_shortest_demo(tmp_path):
    done = demo("--framework", "torch", "--steps", 30, "--out", tmp_path / "new")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "new" / "curves.png").exists()

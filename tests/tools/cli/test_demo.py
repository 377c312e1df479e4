"""`healcore demo`: options and exit status; training and output are in tests/tools/test_demo.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from healcore.tools.cli import app

ROOT = Path(__file__).parents[3]


def demo(*args: object):
    return CliRunner().invoke(app, ["demo", *map(str, args)])


@pytest.mark.parametrize("wrong", [["--framework", "tensorflow"], ["--steps", "5"]])
def test_a_wrong_option_exits_with_2(wrong, tmp_path):
    assert demo(*wrong, "--out", tmp_path / "new").exit_code == 2
    assert not list(tmp_path.iterdir())


def test_a_broken_claim_exits_with_1(tmp_path):
    # 30 steps are too few to train or to be saved in.
    done = demo("--framework", "torch", "--steps", 30, "--out", tmp_path / "new")
    assert done.exit_code == 1
    assert "BROKEN torch healed: trains" in done.output
    assert (tmp_path / "new" / "curves.png").exists()


@pytest.mark.parametrize("missing", ["jax", "torch"])
def test_a_missing_framework_names_the_extra(missing, tmp_path):
    code = f"""
import sys
sys.modules[{missing!r}] = None  # neither found nor imported
from healcore.tools.cli import app
app(["demo", "--framework", {missing!r}, "--out", {str(tmp_path / "new")!r}])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert f"pip install '.[{missing}]'" in done.stderr
    assert "Traceback" not in done.stderr

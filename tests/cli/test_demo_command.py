"""`healcore demo` hands everything to healcore.demo; what that does is tested in tests/demo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from healcore.tools.cli import app

ROOT = Path(__file__).parents[2]


def test_help_is_the_demo_s_own():
    done = CliRunner().invoke(app, ["demo", "--help"])
    assert done.exit_code == 0
    assert "--framework {torch,jax,both}" in done.output


def test_a_wrong_option_exits_with_2():
    assert CliRunner().invoke(app, ["demo", "--framework", "tensorflow"]).exit_code == 2


@pytest.mark.parametrize("missing", ["jax", "torch"])
def test_a_missing_framework_names_the_extra(missing, tmp_path):
    code = f"""
import sys
sys.modules[{missing!r}] = None  # neither found nor imported
from healcore.tools.cli import app
app(["demo", "--framework", {missing!r}, "--out", {str(tmp_path)!r}])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert f"pip install 'healcore[{missing}]'" in done.stderr
    assert "Traceback" not in done.stderr

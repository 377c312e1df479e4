"""Standard output that takes only ASCII."""

from __future__ import annotations

import os
import subprocess
import sys


def test_a_terminal_that_knows_only_ascii(tmp_path):
    path = tmp_path / "é.csv"
    rows = [f"{step},{2 - step / 100}" for step in range(50)] + ["50,nan"]
    path.write_text("step,loss\n" + "\n".join(rows) + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "healcore", "probe", "loss", str(path)]
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    found = subprocess.run(command, check=False, capture_output=True, env=ascii_only, timeout=600)
    assert found.returncode == 2  # FAIL
    assert b".csv" in found.stdout

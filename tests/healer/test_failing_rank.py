"""A rank that fails alone ends and does not wait for the others, which never arrive."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("failing_rank.py")


def test_it_ends_with_its_own_error(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, PROGRAM, str(rank), tmp_path],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        _, stderr = ranks[1].communicate(timeout=600)
        assert ranks[1].returncode == 1
        assert "the shard is gone" in stderr
        assert ranks[0].poll() is None, "the other one still waits"
    finally:
        for each in ranks:
            each.kill()
            each.communicate()

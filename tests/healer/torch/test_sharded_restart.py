"""A sharded run (FSDP2, tensor parallel) in two lives is the run in one, to the bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.healer.torch.sharded_life import OPTIMIZERS

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[list[str], str]]:
    root = tmp_path_factory.mktemp("sharded")
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.healer.torch.sharded_life", str(rank), str(root)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        outcomes = [process.communicate(timeout=1200) for process in running]
    finally:
        for process in running:
            process.kill()
    return [(out.splitlines(), errors) for out, errors in outcomes]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_restart_changes_nothing(name: str, ends: list[tuple[list[str], str]]):
    for lines, errors in ends:
        told = dict(zip(OPTIMIZERS, lines, strict=False))
        assert name in told, errors[-3000:]
        whole, parts = json.loads(told[name])
        assert whole == parts

"""A healed Trainer and a healed fit decide with two ranks as with one, by their own losses."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.torch.trainers.comparing_rank import FAULT, SECONDS
from tests.torch.two_ranks import ROOT

pytestmark = pytest.mark.slow  # processes that import transformers or lightning


def outcomes(which: str, world: int, folder: Path) -> list[Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    module = "tests.torch.trainers.comparing_rank"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(world), str(port), which, str(folder)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    texts = [rank.communicate(timeout=SECONDS + 60) for rank in ranks]
    lines = [[line for line in out.splitlines() if line.startswith("result ")] for out, _ in texts]
    assert all(lines), "\n".join(errors[-3000:] for _, errors in texts)
    return [json.loads(line.removeprefix("result ")) for [line] in lines]


@pytest.mark.parametrize("which", ["transformers", "lightning"])
def test_two_ranks_go_back_as_one_does(which: str, tmp_path: Path):
    [alone] = outcomes(which, 1, tmp_path / "one")
    [rollback] = alone["rollbacks"]
    assert (rollback["checkpoint"], rollback["onset"]) == (20, FAULT)
    for each in outcomes(which, 2, tmp_path / "two"):
        assert each["rollbacks"] == alone["rollbacks"]
        assert each["steps"] == alone["steps"]
        assert each["norm"] == pytest.approx(alone["norm"], rel=1e-4)

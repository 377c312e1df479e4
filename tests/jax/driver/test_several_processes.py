"""Two processes over gloo: both report the same step, and exchanges between them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_two_processes():
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = str(found.getsockname()[1])
    script = [sys.executable, "-m", "tests.jax.driver.two_processes"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    both = [
        subprocess.Popen(
            [*script, rank, port],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in ("0", "1")
    ]
    try:
        outputs = [each.communicate(timeout=600)[0] for each in both]
    finally:
        for each in both:
            each.kill()
    for each, output in zip(both, outputs, strict=True):
        assert each.returncode == 0, output
        assert output.splitlines()[-1] == "done"

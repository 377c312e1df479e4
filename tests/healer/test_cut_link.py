"""Two network namespaces as two hosts: a link that is cut or slow in a save and in a rollback."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def why_not() -> str:
    """Why no namespaces can be made here; "": they can."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        return "needs Linux and iproute2's ip"
    name = f"healcore-try-{os.getpid()}"
    try:
        for command in (["netns", "add"], ["netns", "exec"], ["netns", "del"]):
            more = ["ip", "link", "add", "link0", "type", "veth", "peer", "name", "link1"]
            line = ["ip", *command, name, *(more if command[1] == "exec" else [])]
            subprocess.run(line, check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        return f"needs root and network namespaces: {error.stderr.strip()}"
    return ""


def test_the_job_ends_and_goes_on_when_the_link_is_back(tmp_path):
    reason = why_not()
    if reason:
        pytest.skip(reason)
    done = subprocess.run(
        [sys.executable, "-m", "tests.healer.cut_link", tmp_path],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    # Cut in a rollback, cut in a save, rank 0 killed, and a link that was only slow.
    assert found["statuses"] == [[1, 1], [1, 1], [-9, 1], [0, 0]]

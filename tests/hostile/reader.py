"""`python -m tests.hostile.reader ARGS` is `healcore ARGS` in a fork, within seconds and MiB."""

import json
import os
import resource
import signal
import sys
from typing import NamedTuple

from tests import forked_programs

SECONDS, MIB = 20, 300
"""Bounds beyond the imports, far above what any file here needs."""
LIMIT_SECONDS = 100
LIMIT_BYTES = 12 << 30
"""Limits of a process, so that a failing test does not use up the machine."""
IMPORTS = (
    "torch", "matplotlib",
    "healcore.tools.report.page", "healcore.tools.probe.optimizer",
    "healcore.tools.probe.checkpoint", "healcore.tools.probe.loss",
    "healcore.tools.cli", "healcore.tools.replay",
    "healcore.tools.traces", "tensorboard.backend.event_processing.event_file_loader",
)  # fmt: skip


class Outcome(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err

    def verdicts(self) -> list[str]:
        return [result["verdict"] for result in json.loads(self.out)["results"]]


def run(*args: object, seconds: float = SECONDS) -> Outcome:
    """`healcore ARGS`, within its bounds; no crash, and no traceback is printed."""
    env = {**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    done = forked_programs.run("-m", __name__, *args, imports=IMPORTS, env=env)
    err, _, used = done.stderr.removesuffix("\n").rpartition("\n")
    assert "Traceback" not in err, err
    taken, mib = json.loads(used)
    assert (taken < seconds, mib < MIB) == (True, True), used
    return Outcome(done.returncode, done.stdout, err)


def probe(*args: object, seconds: float = SECONDS) -> Outcome:
    """`healcore probe ARGS --json`, within its bounds."""
    return run("probe", *args, "--json", seconds=seconds)


def main() -> None:
    from healcore.tools.cli import app

    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))
    signal.alarm(LIMIT_SECONDS)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        app(sys.argv[1:])
    finally:
        mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        # The times of this process and its children: a busy machine makes nothing slower.
        print(f"\n{json.dumps([sum(os.times()[:4]), mib])}", file=sys.stderr)


if __name__ == "__main__":
    main()

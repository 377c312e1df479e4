"""Runs commands and functions on crafted files in a child process, within seconds and MiB."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
SECONDS, MIB = 20, 300
"""Bounds beyond the imports, far above what any file here needs."""
_IMPORTS = (
    "torch", "matplotlib",
    "healcore.tools.report.page", "healcore.tools.report.runs", "healcore.tools.probe.optimizer",
    "healcore.tools.probe.checkpoint", "healcore.tools.probe.loss",
    "healcore.tools.cli", "healcore.tools.replay.vary",
    "healcore.tools.traces", "tensorboard.backend.event_processing.event_file_loader",
)  # fmt: skip


class Outcome(NamedTuple):
    """What one command or function did, as `reader_server` reports it."""

    answer: dict[str, Any]

    @property
    def status(self) -> Any:
        """Exit status of a command."""
        return self.answer.get("status")

    @property
    def text(self) -> str:
        """The output of a command on both streams."""
        return self.answer["out"] + self.answer["err"]

    def verdicts(self) -> list[str]:
        """The verdicts of a probe with `--json`."""
        return [result["verdict"] for result in json.loads(self.answer["out"])["results"]]

    def messages(self) -> str:
        """The messages of all checks of a probe with `--json`, joined."""
        results = json.loads(self.answer["out"])["results"]
        return " ".join(check["message"] for result in results for check in result["checks"])


class Reader:
    """Runs commands and functions, each in a process of its own."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("reader_server.py")), *_IMPORTS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        )
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self._server.stdout is not None
        return self._server.stdout.readline().strip()

    def _ask(self, how: str, *args: object, seconds: float, mib: float) -> Outcome:
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps({"how": how, "args": list(map(str, args))}) + "\n")
        self._server.stdin.flush()
        answer = json.loads(self._line())
        assert "crashed" not in answer, answer
        assert answer["seconds"] < seconds, answer
        assert answer["mib"] < mib, answer
        return Outcome(answer)

    def run(self, *args: object, seconds: float = SECONDS, mib: float = MIB) -> Outcome:
        """`healcore ARGS`, within its bounds."""
        return self._ask("cli", *args, seconds=seconds, mib=mib)

    def probe(self, *args: object, **bounds: float) -> Outcome:
        """`healcore probe ARGS --json`; no crash is a verdict, and no traceback is printed."""
        outcome = self.run("probe", *args, "--json", **bounds)
        assert "Traceback" not in outcome.text, outcome
        return outcome

    def call(self, name: str, *args: object, seconds: float = SECONDS, mib: float = MIB) -> Outcome:
        """`module:function(ARGS)`, within its bounds."""
        return self._ask("call", name, *args, seconds=seconds, mib=mib)

    def close(self) -> None:
        """Ends the server."""
        self._server.communicate()

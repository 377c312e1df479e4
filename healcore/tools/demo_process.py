"""Trains the demo's runs of one framework in a child process, so that frameworks train together.

The runs of a framework depend on nothing outside of their process. So the results are the same as
if one framework trained after the other.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import queue
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from healcore import adapter_registry
from healcore import policy as policies
from healcore.core.errors import HealcoreError
from healcore.demo_runs import ARMS, DemoError, Scenario, Step, load_corpus, train
from healcore.tools.report import page
from healcore.tools.report.page_report import PageReport
from healcore.tools.report.run_report import read_reports

PAGE_NAME = "events.report.html"
PROBATION = 20
"""Healthy steps until a checkpoint is known-good; the presets' 100 are a third of a run."""
_START = "from healcore.tools.demo_process import serve; serve()"


class Outcome(NamedTuple):
    """The end of one run, after its last step."""

    held_out_loss: float
    """Nats per byte on held-out text, which may be NaN."""
    report: PageReport | None
    """Report of a healed run, or None."""


class _Failure(NamedTuple):
    """An exception in the child."""

    text: str
    """The message of a `HealcoreError`, or the traceback of another exception."""


class FrameworkProcess:
    """A child process that trains the runs of one framework, in the order of `ARMS`.

        command                          child
           |--- framework, folder, ... --->|   trains the first run
           |<--- Step, Step, text, ... ----|
           |<--- Outcome ------------------|   trains the next run

    A text is what the child prints on standard error, such as the lines of a `Healer`. The command
    prints the text of a run while it follows that run, so that frameworks which train together do
    not mix their lines.

    Args:
        framework: a framework with the capability "demo_training".
        out: the folder of the demo. The healed run writes into `FRAMEWORK-healed` in it.
        steps: steps of each run.
        sizes: fields of `Scenario`, such as `width`.
    """

    def __init__(self, framework: str, out: Path, steps: int, sizes: Mapping[str, int]) -> None:
        self._framework = framework
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-c", _START],  # -P: no imports from the current directory
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        threading.Thread(target=self._receive, daemon=True).start()
        with contextlib.suppress(BrokenPipeError):  # the child has ended, which `follow` reports
            requests: Any = self._child.stdin  # not None, because it is a pipe
            requests.write(pickle.dumps((framework, out, steps, sizes)))
            requests.close()

    @property
    def pid(self) -> int:
        """Id of the process that trains."""
        return self._child.pid

    def __enter__(self) -> FrameworkProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        """Ends the child, which still trains if the command was interrupted."""
        self._child.kill()
        self._child.wait()

    def follow(self, on_step: Callable[[Step], object]) -> Outcome:
        """Waits for the end of the current run, and prints its text on standard error.

        Args:
            on_step: called with each step of the run, also with steps that a rollback undoes.

        Returns:
            The outcome. The next call follows the next run.

        Raises:
            DemoError: the run raised an exception, or the child ended.
        """
        while True:
            message = self._messages.get()
            match message:
                case Step():
                    on_step(message)
                case str():
                    sys.stderr.write(message)
                case Outcome():
                    return message
                case _Failure():
                    raise DemoError(f"the runs in {self._framework} failed: {message.text}")
                case _:
                    status = self._child.wait()
                    raise DemoError(
                        f"the process of the runs in {self._framework} ended with status {status}"
                    )

    def _receive(self) -> None:
        """Reads each message at once. Otherwise the child would wait when its pipe is full."""
        answers: Any = self._child.stdout  # not None, because it is a pipe
        with contextlib.suppress(EOFError, pickle.UnpicklingError):
            while True:
                self._messages.put(pickle.load(answers))
        self._messages.put(None)


class _SentText(io.TextIOBase):
    """Standard error of the child: sends each text to the command."""

    def __init__(self, send: Callable[[object], None]) -> None:
        self._send = send

    def write(self, text: str) -> int:
        """Sends a text, and returns its length."""
        self._send(text)
        return len(text)


def serve() -> None:
    """In the child: answers the request on standard input with steps, texts and outcomes.

    The request is a pickle, and so is each message on standard output.
    """
    messages = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries may print

    def send(message: object) -> None:
        messages.write(pickle.dumps(message))
        messages.flush()

    framework, out, steps, sizes = pickle.load(sys.stdin.buffer)
    sys.stderr = _SentText(send)
    try:
        _train_runs(framework, out, Scenario(load_corpus(), steps=steps, **sizes), send)
    except HealcoreError as error:
        send(_Failure(str(error)))
    except Exception:
        send(_Failure(traceback.format_exc()))


def _train_runs(
    framework: str, out: Path, scenario: Scenario, send: Callable[[object], None]
) -> None:
    """Trains each run, and sends its steps and its outcome."""
    policy = policies.load("default", rollback={"probation": PROBATION})
    make = adapter_registry.find(framework, "demo_training")
    folder = out / f"{framework}-healed"
    for arm in ARMS:
        held_out_loss = train(make, scenario, arm, policy, folder, send)
        report = None
        if arm == "healed":
            (report,) = read_reports(folder / "events.jsonl")
            (folder / PAGE_NAME).write_text(page.render([report]), encoding="utf-8")
        send(Outcome(held_out_loss, report))

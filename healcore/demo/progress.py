"""The bars, one per run, side by side, and what the Healers say between them."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from healcore.demo.history import History, Step
from healcore.demo.table import number


class Bars:
    """A bar per run with its loss now and what healing has done so far."""

    def __init__(self, console: Console, hopeless: float) -> None:
        """Makes an empty set of bars.

        Args:
            console: where they are drawn.
            hopeless: loss from which on it is shown in red.
        """
        self._hopeless = hopeless
        self._tasks: dict[int, TaskID] = {}
        self.progress = Progress(
            TextColumn("{task.fields[framework]:5}"),
            TextColumn("{task.fields[arm]:11}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[healing]}", style="cyan"),
            console=console,
        )

    def add(self, history: History, steps: int) -> None:
        """Adds the bar of a run."""
        self._tasks[id(history)] = self.progress.add_task(
            "", total=steps, framework=history.framework, arm=history.arm, loss="", healing=""
        )

    def step(self, history: History, step: Step) -> None:
        """Moves the bar of a run to a step that has been read."""
        bad = not math.isfinite(step.loss) or step.loss > self._hopeless
        healing = ""
        if history.arm == "healed":
            healing = f"skips {history.skips}, clips {history.clips}, LR x{step.lr_scale:.2g}"
        self.progress.update(
            self._tasks[id(history)],
            completed=step.batch + 1,
            loss=f"[{'red' if bad else 'green'}]{number(step.loss):>6}[/]",
            healing=healing,
        )


class Speaker(logging.Handler):
    """Prints warnings of the Healers, with the name of the run that is having its turn."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console
        self.turn = ""
        """Whose turn it is."""

    def emit(self, record: logging.LogRecord) -> None:
        """Prints one line above the bars."""
        self._console.print(
            f"{self.turn}: {record.getMessage()}", soft_wrap=True, markup=False, highlight=False
        )

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Takes the lines of healcore's logger while it lasts; they go nowhere else."""
        log = logging.getLogger("healcore")
        before = log.level, log.propagate
        log.addHandler(self)
        log.setLevel(logging.INFO)  # at a higher level Healers would print for themselves
        log.propagate = False
        try:
            yield
        finally:
            log.removeHandler(self)
            log.setLevel(before[0])
            log.propagate = before[1]

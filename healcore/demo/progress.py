"""The bars, one per run, side by side."""

from __future__ import annotations

import math

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
            completed=step.step + 1,
            loss=f"[{'red' if bad else 'green'}]{number(step.loss):>6}[/]",
            healing=healing,
        )

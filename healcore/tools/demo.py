"""Follows the demo's runs, which train in a process for each framework, and compares them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from healcore.adapter_registry import require
from healcore.demo_runs import ARMS, FIXED_CLIP, SAVE_EVERY, DemoError, Scenario, Step, load_corpus
from healcore.tools import output
from healcore.tools.demo_process import PAGE_NAME, PROBATION, FrameworkProcess
from healcore.tools.report.page_report import PageReport

FRAMEWORKS = {"torch": ("torch",), "jax": ("jax", "optax")}


@dataclass
class DemoRun:
    """One run of the demo: its framework, its arm and its data.

    All runs of a demo have the same `Scenario`. The arms differ only in their protection: none,
    clipping to a fixed norm, or a `Healer`.
    """

    framework: str
    arm: str
    steps: list[Step] = field(default_factory=list)
    """All steps in the order taken, including the steps that a rollback has undone."""
    held_out_loss: float = math.nan
    """Nats per byte on held-out text at the end of the run."""
    report: PageReport | None = None
    """Report of a healed run."""

    def mean_loss(self, until: int) -> float:
        """Mean loss of the last 20 steps before a batch, except undone steps.

        Args:
            until: index of the batch.

        Returns:
            The loss in nats per byte, or NaN if no step was taken before the batch.
        """
        kept: dict[int, Step] = {}
        for step in self.steps:
            kept[step.step] = step  # a repeated step replaces the undone step
        losses: list[float] = []
        for step in kept.values():
            if step.batch < until:
                losses.append(step.loss)
        if not losses:
            return math.nan
        return float(np.mean(losses[-20:]))

    def skips_and_clips(self) -> tuple[int, int]:
        """Counts the steps in which a protection changed the update.

        Returns:
            The numbers of skipped and of clipped steps: of a healed run from its report, of a run
            with a fixed clip from the logged norms.
        """
        if self.report is not None:
            return self.report.counts.skips, self.report.counts.clips or 0
        clips = 0
        if self.arm == "fixed clip":
            for step in self.steps:
                if step.grad_norm > FIXED_CLIP:
                    clips += 1
        return 0, clips


def run_demo(
    out: Path,
    *,
    frameworks: Sequence[str] = tuple(FRAMEWORKS),
    steps: int = 300,
    console: Console | None = None,
    **sizes: int,
) -> list[DemoRun]:
    """Trains one run per framework and arm, prints the outcomes, and returns the runs.

    The frameworks train at the same time, in a process each. Their progress is shown one after the
    other, in the order of `frameworks`.

    Args:
        out: folder to create. Each healed run gets a folder in it, with its checkpoints, events,
            metrics, postmortem and report.
        frameworks: keys of `FRAMEWORKS`.
        steps: steps of each run.
        console: where to print, or None for the console of the commands.
        **sizes: fields of `Scenario`, such as `width`, for a smaller model in a test.

    Returns:
        The runs, in the order of the frameworks and the arms.

    Raises:
        MissingExtraError: a library is not installed.
        DemoError: the corpus is missing, there are too few steps, `out` exists, or a run failed.
    """
    require("report", "matplotlib", "jinja2")
    for framework in frameworks:
        require(framework, *FRAMEWORKS[framework])
    scenario = Scenario(load_corpus(), steps=steps, **sizes)
    try:
        out.mkdir(parents=True)
    except FileExistsError:
        raise DemoError(
            f"{out} exists: delete it, name another folder with --out, or leave out --out"
        ) from None
    console = console or output.console()
    _introduce(console, scenario)
    runs: list[DemoRun] = []
    with ExitStack() as stack:
        processes: dict[str, FrameworkProcess] = {}
        for framework in frameworks:
            process = FrameworkProcess(framework, out, steps, sizes)
            processes[framework] = stack.enter_context(process)
        for framework, process in processes.items():
            for arm in ARMS:
                runs.append(_follow(process, framework, arm, steps, console))
    console.print(_comparison(runs, scenario), "")
    console.print("\nopen the report of a healed run in a browser:", highlight=False)
    for framework in frameworks:
        page_path = out.absolute() / f"{framework}-healed" / PAGE_NAME
        console.print(f"  {page_path}", soft_wrap=True, markup=False, highlight=False)
    console.print(f"events and checkpoints: {out}", soft_wrap=True, markup=False, highlight=False)
    return runs


def _introduce(console: Console, scenario: Scenario) -> None:
    """Prints what is trained, and which faults the runs meet."""
    raised = scenario.wrong_lr_steps
    corrupted = ", ".join(map(str, sorted(scenario.corrupted_batches)))
    console.print(
        f"[bold]A byte-level transformer[/] ({scenario.layers} layers, width {scenario.width}) on "
        f"the {scenario.corpus.files} modules of the standard library, {scenario.steps} steps. "
        f"Faults: random bytes instead of text in batches {corrupted}; a learning rate "
        f"{scenario.lr_factor:g} times too high in steps {raised.start} to {raised.stop - 1}; a "
        f"loss of 0/0 in batch {scenario.empty_batch}. Because the run is short, it saves a "
        f"checkpoint every {SAVE_EVERY} steps, which is known-good after {PROBATION} healthy "
        "steps.\n"
    )


def _follow(
    process: FrameworkProcess, framework: str, arm: str, steps: int, console: Console
) -> DemoRun:
    """Shows the progress of the current run of a framework, and returns the run at its end."""
    run = DemoRun(framework, arm)
    columns = (TextColumn("{task.description:17}"), BarColumn(bar_width=30), MofNCompleteColumn())
    with Progress(*columns, console=console) as bars:
        bar = bars.add_task(f"{framework} {arm}", total=steps)

        def on_step(step: Step) -> None:
            run.steps.append(step)
            bars.update(bar, completed=step.batch + 1)

        run.held_out_loss, run.report = process.follow(on_step)
    return run


def _comparison(runs: Sequence[DemoRun], scenario: Scenario) -> Table:
    """Builds the table of the outcomes, with a row for each run."""
    table = Table(
        "",
        *("loss\nbefore", "loss on\nunseen", "skips", "clips", "rollbacks"),
        caption="loss: nats per byte; before: mean of the 20 steps before the empty batch; on "
        "unseen: at the end, on text in no training batch",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for run in runs:
        rollbacks: list[str] = []
        if run.report is not None:
            for attempt in run.report.attempts[1:]:
                rollbacks.append(f"{attempt.left:.0f} → {attempt.first_step:.0f}")
        skips, clips = run.skips_and_clips()
        table.add_row(
            f"{run.framework} {run.arm}",
            format_loss(run.mean_loss(scenario.empty_batch)),
            format_loss(run.held_out_loss),
            str(skips),
            str(clips),
            ", ".join(rollbacks),
            end_section=run.arm == ARMS[-1],
        )
    return table


def format_loss(loss: float) -> str:
    """Formats a loss in at most 6 characters, so that the columns of the table stay narrow.

    Args:
        loss: a loss in nats, which may be NaN or infinite.

    Returns:
        A text such as "2.31", "4e+07" or "NaN".
    """
    if math.isnan(loss):
        return "NaN"
    if math.isinf(loss):
        return "inf"
    if abs(loss) < 1000:
        return f"{loss:.2f}"
    return f"{loss:.0e}"

"""Trains the demo's runs, and prints and draws the comparison."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from healcore import adapter_registry
from healcore import policy as policies
from healcore.adapter_registry import require
from healcore.demo_runs import ARMS, FIXED_CLIP, SAVE_EVERY, DemoError, Scenario, Step, load_corpus
from healcore.tools import output
from healcore.tools.report import page
from healcore.tools.report.run_report import RunReport, read_reports

FRAMEWORKS = {"torch": ("torch",), "jax": ("jax", "optax")}
PAGE_NAME = "events.report.html"
PROBATION = 20
"""Healthy steps until a checkpoint is known-good; the presets' 100 are a third of a run."""


@dataclass
class DemoRun:
    """One run: its framework, its arm and its data."""

    framework: str
    arm: str
    steps: list[Step] = field(default_factory=list)
    """All steps in the order taken, including the steps that a rollback has undone."""
    held_out_loss: float = math.nan
    """Nats per byte on held-out text at the end of the run."""
    report: RunReport | None = None
    """Report of a healed run."""

    def mean_loss(self, until: int) -> float:
        """Mean loss of the last 20 steps before batch `until`, except undone steps."""
        kept = {step.step: step for step in self.steps}  # a repeated step replaces the undone step
        losses = [step.loss for step in kept.values() if step.batch < until]
        return float(np.mean(losses[-20:])) if losses else math.nan

    def skips_and_clips(self) -> tuple[int, int]:
        """Numbers of skipped and of clipped steps."""
        if self.report is not None:
            return self.report.counts.skips, self.report.counts.clips or 0
        is_clipped = self.arm == "fixed clip"
        return 0, sum(is_clipped and step.grad_norm > FIXED_CLIP for step in self.steps)


def run_demo(
    out: Path,
    *,
    frameworks: Sequence[str] = tuple(FRAMEWORKS),
    steps: int = 300,
    console: Console | None = None,
    **sizes: int,
) -> list[DemoRun]:
    """Trains one run per framework and arm, prints the outcomes, and returns the runs.

    Writes a folder for each healed run into `out`, with its checkpoints, events, metrics,
    postmortem and report. `sizes` are fields of `Scenario`.

    Raises:
        MissingExtraError: a library is not installed.
        DemoError: the corpus is missing, there are too few steps, or `out` exists.
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
    policy = policies.load("default", rollback={"probation": PROBATION})
    _introduce(console, scenario)
    runs = [DemoRun(framework, arm) for framework in frameworks for arm in ARMS]
    columns = TextColumn("{task.description:17}"), BarColumn(bar_width=30), MofNCompleteColumn()
    for run in runs:
        with Progress(*columns, console=console) as bars:
            bar = bars.add_task(f"{run.framework} {run.arm}", total=steps)
            progress = functools.partial(bars.update, bar)
            _train(run, scenario, policy, out / f"{run.framework}-healed", progress)
    table = Table(
        "",
        *("loss\nbefore", "loss on\nunseen", "skips", "clips", "rollbacks"),
        caption="loss: nats per byte; before: mean of the 20 steps before the empty batch; on "
        "unseen: at the end, on text in no training batch",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for run in runs:
        losses = map(format_loss, (run.mean_loss(scenario.empty_batch), run.held_out_loss))
        attempts = run.report.attempts[1:] if run.report else ()
        rollbacks = ", ".join(f"{each.left:.0f} → {each.first_step:.0f}" for each in attempts)
        counts = map(str, run.skips_and_clips())
        name = f"{run.framework} {run.arm}"
        table.add_row(name, *losses, *counts, rollbacks, end_section=run.arm == ARMS[-1])
    console.print(table, "")
    console.print("\nopen the report of a healed run in a browser:", highlight=False)
    for framework in frameworks:
        page_path = out.absolute() / f"{framework}-healed" / PAGE_NAME
        console.print(f"  {page_path}", soft_wrap=True, markup=False, highlight=False)
    console.print(f"events and checkpoints: {out}", soft_wrap=True, markup=False, highlight=False)
    return runs


def _introduce(console: Console, scenario: Scenario) -> None:
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


def _train(run: DemoRun, scenario: Scenario, policy: Any, folder: Path, progress: Any) -> None:
    def on_step(step: Step) -> None:
        run.steps.append(step)
        progress(completed=step.batch + 1)

    train = adapter_registry.find(run.framework, "demo_training")
    run.held_out_loss = train(scenario, run.arm, policy, folder, on_step)
    if run.arm == "healed":
        (run.report,) = read_reports(folder / "events.jsonl")
        (folder / PAGE_NAME).write_text(page.render([run.report]), encoding="utf-8")


def format_loss(loss: float) -> str:
    """Formats a loss in at most 6 characters."""
    if not math.isfinite(loss):
        return "NaN" if math.isnan(loss) else "inf"
    return f"{loss:.2f}" if abs(loss) < 1000 else f"{loss:.0e}"

"""Trains the demo's runs in turns, and prints and draws the comparison."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Generator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from healcore import adapter_registry, events
from healcore import policy as policies
from healcore.demo.runs import (
    ARMS,
    FIXED_CLIP,
    SAVE_EVERY,
    DemoClaim,
    DemoRun,
    Outcome,
    Step,
    check_claims,
    classify,
    format_loss,
    with_short_probation,
)
from healcore.demo.scenario import Scenario, load_corpus
from healcore.extras import require
from healcore.history import Curves
from healcore.policy import Policy
from healcore.tools import terminal
from healcore.tools.output_files import OutputError, check_default_path, replacing
from healcore.tools.report import page, picture
from healcore.tools.report.run_report import RunReport
from healcore.tools.report.runs import read_reports

FRAMEWORKS = {"torch": ("torch",), "jax": ("jax", "optax")}
_STYLES = {Outcome.TRAINED: "green", Outcome.NEITHER: "yellow", Outcome.FAILED: "red"}


class DemoResult(NamedTuple):
    """The finished runs, and claims that compare the runs."""

    runs: list[DemoRun]
    claims: list[DemoClaim]


def run_demo(
    *,
    frameworks: Sequence[str] = tuple(FRAMEWORKS),
    arms: Sequence[str] = ARMS,
    seeds: Sequence[int] = (0,),
    steps: int = 300,
    policy: Any = "default",
    out: Path | None = None,
    console: Console | None = None,
    **sizes: int,
) -> DemoResult:
    """Trains one run per framework, seed and arm, and prints the outcomes.

    Writes `curves.png` into `out` (default `healcore-demo`), and a folder for each healed run with
    its checkpoints, events, metrics, postmortem and report. Deletes the folders of an earlier demo.
    `arms` must contain "healed". The healed runs use `with_short_probation(policy)`. `sizes` are
    fields of `Scenario`.

    Raises:
        MissingExtraError: a library is not installed.
        PolicyError: the policy is invalid.
        DemoError: the corpus is missing, or steps or sizes are invalid.
        OutputError: an output is a link, or a run's folder is not from a demo.
    """
    require("report", "matplotlib", "jinja2")
    for framework in frameworks:
        require(framework, *FRAMEWORKS[framework])
    policy, text = with_short_probation(policies.load(policy)), load_corpus()
    scenarios = [Scenario(text, seed=seed, steps=steps, **sizes) for seed in seeds]
    names = [f"{f}-healed-seed{s.seed}" for s, f in product(scenarios, frameworks)]
    out = _check_output(out, names)
    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    console = console or terminal.console()
    _introduce(console, scenarios[0], policy)
    runs: list[DemoRun] = []
    for scenario in scenarios:
        training = []
        for framework, arm in product(frameworks, arms):
            run = DemoRun(framework, arm, scenario.seed)
            if arm == "healed":
                run.folder = out / f"{framework}-healed-seed{scenario.seed}"
                if run.folder.exists():
                    shutil.rmtree(run.folder)  # from an earlier demo, see `_check_output`
                run.folder.mkdir()
            train = adapter_registry.find(framework, "demo_training")
            training.append((run, train(scenario, arm, policy, run.folder)))
            runs.append(run)
        _train(console, scenario, training)
    for run in runs:
        if run.arm == "healed":
            run.events = events.read(run.folder / "events.jsonl").events
    checked = check_claims(runs, scenarios[0])
    _show(console, runs, checked, scenarios[0], out)
    console.print(f"the demo took {time.monotonic() - started:.0f} s", highlight=False)
    return DemoResult(runs, checked)


def _check_output(out: Path | None, runs: Sequence[str]) -> Path:
    """Returns the output folder. Raises OutputError if a demo did not write a folder in it."""
    if out is None:
        out = Path("healcore-demo")
        check_default_path(out, folder=True)
    check_default_path(out / "curves.png")
    for folder in (out / name for name in runs):
        check_default_path(folder, folder=True)
        log = folder / "events.jsonl"
        from_demo = not log.is_symlink() and log.is_file() and events.read(log).events
        if folder.exists() and not from_demo and any(folder.iterdir()):
            raise OutputError(
                f"{folder} has no events of an earlier demo, and the demo deletes only its own "
                "files: move the folder, or name another output with --out"
            )
    return out


def _train(
    console: Console, scenario: Scenario, runs: Sequence[tuple[DemoRun, Generator[Step, None, Any]]]
) -> None:
    columns = TextColumn("{task.description:17}"), BarColumn(bar_width=30), MofNCompleteColumn()
    loss = TextColumn("loss {task.fields[loss]:>6}")
    with Progress(*columns, loss, console=console) as bars, _WarningPrinter(console) as warnings:
        unfinished = [
            (run, loop, bars.add_task(str(run), total=scenario.steps, loss=""))
            for run, loop in runs
        ]
        while unfinished:
            for entry in tuple(unfinished):
                run, loop, bar = entry
                warnings.framework = run.framework
                try:
                    run.steps.append(next(loop))
                except StopIteration as end:
                    run.finish(end.value)
                    unfinished.remove(entry)
                else:
                    # The previous loss, because reading the newest would wait for the device.
                    previous = float(run.steps[-2:][0].loss)
                    bars.update(bar, completed=run.steps[-1].batch + 1, loss=format_loss(previous))


class _WarningPrinter(logging.Handler):
    """Context manager that prints warnings of the Healers only above the progress bars."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self.framework = ""
        """Framework of the current run."""
        self._console = console
        self._log = logging.getLogger("healcore")
        self._propagate = self._log.propagate

    def emit(self, record: logging.LogRecord) -> None:
        """Prints a warning with the name of its framework."""
        line = f"{self.framework}: {record.getMessage()}"
        self._console.print(line, soft_wrap=True, markup=False, highlight=False)

    def __enter__(self) -> _WarningPrinter:
        self._log.addHandler(self)
        self._log.propagate = False
        return self

    def __exit__(self, *_: object) -> None:
        self._log.removeHandler(self)
        self._log.propagate = self._propagate


def _introduce(console: Console, scenario: Scenario, policy: Policy) -> None:
    raised = scenario.wrong_lr_steps
    corrupted = ", ".join(map(str, sorted(scenario.corrupted_batches)))
    console.print(
        f"[bold]A byte-level transformer[/] ({scenario.layers} layers, width {scenario.width}) on "
        f"the {scenario.corpus.files} modules of the standard library, {scenario.steps} steps. "
        f"Faults: random bytes instead of text in batches {corrupted}; a learning rate "
        f"{scenario.lr_factor:g} times too high in steps {raised.start} to {raised.stop - 1}; a "
        f"loss of 0/0 in batch {scenario.empty_batch}. Policy: [cyan]{policy.name}[/]. Because the "
        f"run is short, it saves a checkpoint every {SAVE_EVERY} steps, which is known-good after "
        f"{policy.rollback.probation} healthy steps.\n"
    )


def _show(
    console: Console,
    runs: Sequence[DemoRun],
    checked: Sequence[DemoClaim],
    scenario: Scenario,
    out: Path,
) -> None:
    healed = [run for run in runs if run.arm == "healed"]
    reports = {str(run): read_reports(run.folder / "events.jsonl")[0] for run in healed}
    console.print(_table(runs, reports, scenario), "")
    for claim in checked:
        sign = "[green]ok[/]    " if claim.holds else "[red]BROKEN[/]"
        console.print(f"{sign} {claim.text}", highlight=False, soft_wrap=True)
    pages = []
    for run in healed:
        pages.append(run.folder / "events.report.html")
        with replacing(pages[-1], from_user=False) as draft:
            draft.write_text(page.render([reports[str(run)]]), encoding="utf-8")
    with replacing(out / "curves.png", from_user=False) as draft:
        picture.draw(
            [report._replace(title=name) for name, report in reports.items()],
            draft,
            backdrops={str(run): _backdrop(run, runs, scenario) for run in healed},
        )
    console.print("\n".join(("", *(f"page: {path}" for path in pages))), soft_wrap=True)
    console.print(f"picture: {out / 'curves.png'}", soft_wrap=True)


def _table(runs: Sequence[DemoRun], reports: dict[str, RunReport], scenario: Scenario) -> Table:
    table = Table(
        caption="loss: nats per byte; before: mean of the 20 steps before the empty batch; on "
        "unseen: at the end, on text in no training batch",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
    )
    table.add_column("")
    for name in ("loss\nbefore", "loss on\nunseen", "skips", "clips", "rollbacks", "LR\nafter"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(" ", no_wrap=True)
    for run in runs:
        result, report = classify(run, scenario.corpus), reports.get(str(run))
        skips, clips = (report.counts.skips, report.counts.clips) if report else (0, 0)
        if run.arm == "fixed clip":
            clips = int((run.column("grad_norm") > FIXED_CLIP).sum())
        table.add_row(
            str(run),
            format_loss(run.mean_loss(scenario.empty_batch)),
            format_loss(run.held_out_loss),
            str(skips),
            str(clips),
            "\n".join(f"{event['onset']} → {event['checkpoint']}" for event in run.rollbacks),
            "\n".join(_lr_after(event) for event in run.rollbacks),
            f" [{_STYLES[result]}]{result.value}[/]",
            end_section=run.arm == "healed",
        )
    return table


def _lr_after(rollback: Mapping[str, Any]) -> str:
    """Returns the limit of the learning rate after a rollback, or else its multiplier."""
    limit = rollback.get("lr_limit")
    return f"× {rollback['lr_scale']:g}" if limit is None else f"≤ {limit:.3g}"


def _backdrop(healed: DemoRun, runs: Sequence[DemoRun], scenario: Scenario) -> picture.Backdrop:
    """Returns the curves of the other arms with equal framework and seed, and the faults' spans."""
    others = {
        run.arm: Curves(run.column("step"), run.column("loss"), run.column("grad_norm"))
        for run in runs
        if (run.framework, run.seed) == (healed.framework, healed.seed) and run is not healed
    }
    raised, corrupted = scenario.wrong_lr_steps, sorted(scenario.corrupted_batches)
    spans = [
        (raised.start, raised.stop - 1, f"learning rate × {scenario.lr_factor:g}"),
        *((corrupted[i], corrupted[i + 1], "random bytes") for i in (0, 2)),
        (scenario.empty_batch, scenario.empty_batch, "empty batch"),
    ]
    return picture.Backdrop(others, spans, label="healed")

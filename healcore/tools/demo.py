"""Trains the demo's runs step by step, and prints and draws the comparison."""

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
    claims,
    number,
    outcome,
    shortened,
)
from healcore.demo.scenario import Scenario, load_corpus
from healcore.extras import require
from healcore.history import Curves
from healcore.policy import Policy
from healcore.tools import terminal
from healcore.tools.output_files import OutputError, check_chosen, replacing
from healcore.tools.report import page, picture
from healcore.tools.report.run_report import RunReport
from healcore.tools.report.runs import read_reports

FRAMEWORKS = {"torch": ("torch",), "jax": ("jax", "optax", "chex")}
_STYLES = {Outcome.TRAINED: "green", Outcome.NEITHER: "yellow", Outcome.FAILED: "red"}


class DemoResult(NamedTuple):
    """The finished runs and the claims about them."""

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
    its checkpoints, events, metrics, postmortem and report. It deletes the folders of an earlier
    demo. `arms` must contain "healed". The probation of `policy` is `shortened`. `sizes` are
    fields of `Scenario`.

    Raises MissingExtraError, healcore.policy.PolicyError, a DemoError for a missing corpus, too few
    steps, or sizes that do not fit, or an OutputError for a link in the place of an output, and for
    a folder in the place of a run that no demo has written.
    """
    require("report", "matplotlib", "jinja2")
    for framework in frameworks:
        require(framework, *FRAMEWORKS[framework])
    policy, text = shortened(policies.load(policy)), load_corpus()
    scenarios = [Scenario(text, seed=seed, steps=steps, **sizes) for seed in seeds]
    names = [f"{f}-healed-seed{s.seed}" for s, f in product(scenarios, frameworks)]
    out = _checked(out, names)
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
                    shutil.rmtree(run.folder)  # of an earlier demo, see `_checked`
                run.folder.mkdir()
            train = adapter_registry.find(framework, "demo_training")
            training.append((run, train(scenario, arm, policy, run.folder)))
            runs.append(run)
        _train(console, scenario, training)
    for run in runs:
        if run.arm == "healed":
            run.events = events.read(run.folder / "events.jsonl").events
    found = claims(runs, scenarios[0])
    _show(console, runs, found, scenarios[0], out)
    console.print(f"{time.monotonic() - started:.0f} s", highlight=False)
    return DemoResult(runs, found)


def _checked(out: Path | None, runs: Sequence[str]) -> Path:
    """The output folder, if nothing in the place of the output is another person's."""
    if out is None:
        out = Path("healcore-demo")
        check_chosen(out, folder=True)
    check_chosen(out / "curves.png")
    for folder in (out / name for name in runs):
        check_chosen(folder, folder=True)
        log = folder / "events.jsonl"
        written = not log.is_symlink() and log.is_file() and events.read(log).events
        if folder.exists() and not written and any(folder.iterdir()):
            raise OutputError(
                f"{folder} has no events of an earlier demo, and the demo deletes only what it has "
                "written: move that folder away, or name another output with --out"
            )
    return out


def _train(
    console: Console,
    scenario: Scenario,
    runs: Sequence[tuple[DemoRun, Generator[Step, None, Any]]],
) -> None:
    columns = TextColumn("{task.description:17}"), BarColumn(bar_width=30), MofNCompleteColumn()
    loss = TextColumn("loss {task.fields[loss]:>6}")
    with Progress(*columns, loss, console=console) as bars, _Warnings(console) as warnings:
        left = [
            (*each, bars.add_task(str(each[0]), total=scenario.steps, loss="")) for each in runs
        ]
        while left:
            for each in tuple(left):
                run, loop, bar = each
                warnings.turn = run.framework
                try:
                    run.steps.append(next(loop))
                except StopIteration as end:
                    run.finish(end.value)
                    left.remove(each)
                else:
                    # The loss before the newest is on the host already, so this does not wait.
                    before = float(run.steps[-2:][0].loss)
                    bars.update(bar, completed=run.steps[-1].batch + 1, loss=number(before))


class _Warnings(logging.Handler):
    """Context manager: warnings of the Healers are printed above the bars and nowhere else."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self.turn = ""
        """Framework of the run whose turn it is."""
        self._console = console
        self._log = logging.getLogger("healcore")
        self._before = self._log.propagate

    def emit(self, record: logging.LogRecord) -> None:
        """Prints one warning."""
        line = f"{self.turn}: {record.getMessage()}"
        self._console.print(line, soft_wrap=True, markup=False, highlight=False)

    def __enter__(self) -> _Warnings:
        self._log.addHandler(self)
        self._log.propagate = False
        return self

    def __exit__(self, *_: object) -> None:
        self._log.removeHandler(self)
        self._log.propagate = self._before


def _introduce(console: Console, scenario: Scenario, policy: Policy) -> None:
    wrong, bad = scenario.mistaken, ", ".join(map(str, sorted(scenario.corrupted)))
    console.print(
        f"[bold]A byte-level transformer[/] ({scenario.layers} layers, width {scenario.width}) on "
        f"the {scenario.corpus.files} modules of the standard library, {scenario.steps} steps. "
        f"Random bytes instead of text in batches {bad}; a learning rate {scenario.mistake:g} "
        f"times too high in steps {wrong.start} to {wrong.stop - 1}; a batch whose loss is 0/0, "
        f"number {scenario.empty}. Policy: [cyan]{policy.name}[/], with a checkpoint every "
        f"{SAVE_EVERY} steps that is known-good after {policy.rollback.probation} healthy ones, "
        "because the run is so short.\n"
    )


def _show(
    console: Console,
    runs: Sequence[DemoRun],
    found: Sequence[DemoClaim],
    scenario: Scenario,
    out: Path,
) -> None:
    healed = [run for run in runs if run.arm == "healed"]
    reports = {str(run): read_reports(run.folder / "events.jsonl")[0] for run in healed}
    console.print(_table(runs, reports, scenario), "")
    for claim in found:
        sign = "[green]ok[/]    " if claim.holds else "[red]BROKEN[/]"
        console.print(f"{sign} {claim.text}", highlight=False, soft_wrap=True)
    pages = []
    for run in healed:
        pages.append(run.folder / "events.report.html")
        with replacing(pages[-1], named=False) as draft:
            draft.write_text(page.render([reports[str(run)]]), encoding="utf-8")
    with replacing(out / "curves.png", named=False) as draft:
        picture.draw(
            [report._replace(title=name) for name, report in reports.items()],
            draft,
            backdrops={str(run): _backdrop(run, runs, scenario) for run in healed},
        )
    console.print("\n".join(("", *(f"page: {each}" for each in pages))), soft_wrap=True)
    console.print(f"picture: {out / 'curves.png'}", soft_wrap=True)


def _table(runs: Sequence[DemoRun], reports: dict[str, RunReport], scenario: Scenario) -> Table:
    table = Table(
        caption="loss: nats per byte, the mean of the 20 steps before the empty batch, and at the "
        "end on text that no run was trained on",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
    )
    table.add_column("")
    for name in ("loss\nbefore", "loss on\nunseen", "skips", "clips", "rollbacks", "LR\nafter"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(" ", no_wrap=True)
    for run in runs:
        found, report = outcome(run, scenario.corpus), reports.get(str(run))
        skips, clips = (report.counts.skips, report.counts.clips) if report else (0, 0)
        if run.arm == "fixed clip":
            clips = int((run.column("grad_norm") > FIXED_CLIP).sum())
        table.add_row(
            str(run),
            number(run.mean_loss(scenario.empty)),
            number(run.held_out_loss),
            str(skips),
            str(clips),
            "\n".join(f"{back['onset']} → {back['checkpoint']}" for back in run.rollbacks),
            "\n".join(_lr_after(back) for back in run.rollbacks),
            f" [{_STYLES[found]}]{found.value}[/]",
            end_section=run.arm == "healed",
        )
    return table


def _lr_after(back: Mapping[str, Any]) -> str:
    """What a rollback has done to the learning rate: its limit, or the multiplier."""
    limit = back.get("lr_limit")
    return f"× {back['lr_scale']:g}" if limit is None else f"≤ {limit:.3g}"


def _backdrop(healed: DemoRun, runs: Sequence[DemoRun], scenario: Scenario) -> picture.Backdrop:
    """The curves of the other arms of the same framework and seed, and the spans of the faults."""
    others = {
        run.arm: Curves(run.column("step"), run.column("loss"), run.column("grad_norm"))
        for run in runs
        if (run.framework, run.seed) == (healed.framework, healed.seed) and run is not healed
    }
    wrong, bad = scenario.mistaken, sorted(scenario.corrupted)
    spans = [
        (wrong.start, wrong.stop - 1, f"learning rate × {scenario.mistake:g}"),
        *((bad[i], bad[i + 1], "random bytes") for i in (0, 2)),
        (scenario.empty, scenario.empty, "empty batch"),
    ]
    return picture.Backdrop(others, spans, label="healed")

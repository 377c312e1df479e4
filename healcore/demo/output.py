"""What the demo shows: a table, its claims, a picture, and the report of each healed run.

The picture and the pages are those of `healcore report`; this is the one place that uses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from healcore.demo.claims import Claim, Outcome, outcome
from healcore.demo.runs import FIXED_CLIP, SAVE_EVERY, DemoRun, number
from healcore.demo.scenario import Scenario
from healcore.history import Curves
from healcore.policy import Policy
from healcore.tools.report import page, picture
from healcore.tools.report.run_report import RunReport
from healcore.tools.report.runs import read_reports

_STYLES = {Outcome.TRAINED: "green", Outcome.NEITHER: "yellow", Outcome.FAILED: "red"}


def introduce(console: Console, scenario: Scenario, policy: Policy) -> None:
    """Prints what is going to happen."""
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


def show(
    console: Console,
    runs: Sequence[DemoRun],
    claims: Sequence[Claim],
    scenario: Scenario,
    out: Path,
) -> None:
    """Prints the table and the claims, and writes the picture and the pages.

    Args:
        console: where to print.
        runs: finished, with their events.
        claims: about them.
        scenario: any seed's.
        out: folder of the picture.
    """
    healed = [run for run in runs if run.arm == "healed"]
    reports = {str(run): read_reports(run.folder / "events.jsonl").reports[0] for run in healed}
    console.print(_table(runs, reports, scenario), "")
    for claim in claims:
        sign = "[green]ok[/]    " if claim.holds else "[red]BROKEN[/]"
        console.print(f"{sign} {claim.text}", highlight=False, soft_wrap=True)
    pages = []
    for run in healed:
        pages.append(run.folder / "events.report.html")
        pages[-1].write_text(page.render([reports[str(run)]]), encoding="utf-8")
    picture.draw(
        [report._replace(title=name) for name, report in reports.items()],
        out / "curves.png",
        behind={str(run): _behind(run, runs, scenario) for run in healed},
    )
    console.print("\n".join(("", *(f"page: {each}" for each in pages))), soft_wrap=True)
    console.print(f"picture: {out / 'curves.png'}", soft_wrap=True)


def _table(runs: Sequence[DemoRun], reports: dict[str, RunReport], scenario: Scenario) -> Table:
    """One row per run, as it came out."""
    table = Table(
        caption="loss: nats per byte, the mean of the 20 steps before the empty batch, and at the "
        "end on text that no run was trained on",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
    )
    table.add_column("")
    for name in ("loss\nbefore", "loss on\nunseen", "skips", "clips", "rollbacks", "LR ×"):
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
            "\n".join(f"{back['lr_scale']:g}" for back in run.rollbacks),
            f" [{_STYLES[found]}]{found.value}[/]",
            end_section=run.arm == "healed",
        )
    return table


def _behind(healed: DemoRun, runs: Sequence[DemoRun], scenario: Scenario) -> picture.Backdrop:
    """The other arms of its framework and seed, and where the faults are."""
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
    return picture.Backdrop(others, spans, itself="healed")

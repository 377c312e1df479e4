"""The story of the runs in three acts, as a newcomer needs it."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from healcore.demo.history import History
from healcore.demo.outcome import pairs_of
from healcore.demo.scenario import Scenario
from healcore.demo.table import number


def tell(console: Console, histories: Sequence[History], scenario: Scenario) -> None:
    """Prints the acts of all runs that were trained unprotected and healed.

    Args:
        console: where.
        histories: finished runs, with what their events say.
        scenario: any seed's.
    """
    pairs = pairs_of(histories)
    if not pairs:
        return

    def say(line: str) -> None:
        console.print(f"  {line}", highlight=False)

    console.print("[bold]Act 1: unprotected.[/]")
    for plain, _ in pairs:
        say(f"{name(plain)}: {_lost(plain, scenario)}")
    console.print("\n[bold]Act 2: healed, a bad batch costs its step.[/]")
    bad = {*scenario.corrupted, scenario.empty}
    for _, healed in pairs:
        skipped = [step.batch for step in healed.kept if step.skip and step.batch in bad]
        say(f"{name(healed)}: batches {ranges(skipped)} skipped")
    console.print("\n[bold]Act 3: healed, a run that diverges goes back by itself.[/]")
    if any(healed.rollbacks for _, healed in pairs):
        console.print(_returns([healed for _, healed in pairs]))
    else:
        say("no run has gone back")
    console.print(_ends(pairs, scenario))


def name(history: History) -> str:
    """Which run it is, in a few characters."""
    return history.framework + (f" {history.seed}" if history.seed else "")


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in a few characters: 112-115, 120."""
    parts: list[list[int]] = []
    for each in numbers:
        if parts and each == parts[-1][-1] + 1:
            parts[-1].append(each)
        else:
            parts.append([each])
    said = [f"{one[0]}-{one[-1]}" if len(one) > 1 else str(one[0]) for one in parts]
    return ", ".join(said) or "none"


def _lost(plain: History, scenario: Scenario) -> str:
    """When the wrong learning rate has ruined it."""
    hopeless = scenario.corpus.byte_frequency_loss
    ruined = (
        step for step in plain.steps if step.step in scenario.mistaken and not step.loss < hopeless
    )
    first = next(ruined, None)
    before, end = plain.mean_loss(scenario.empty), plain.held_out_loss
    if first is None:
        return (
            f"it does not; loss {number(before)} before the empty batch, {number(end)} at the end"
        )
    return (
        f"loss {number(first.loss)} at step {first.step}, {number(before)} before the empty "
        f"batch, {number(end)} at the end"
    )


def _returns(runs: Sequence[History]) -> Table:
    """A row for each rollback; the same step's learning rate, before and after."""
    shown = Table(box=box.SIMPLE_HEAD, padding=0, header_style="bold")
    shown.add_column("")
    for title in (
        "diverges\nat step",
        "loss\nthere",
        "goes back to\nknown-good",
        "learning rate\nat that step",
        "batches\nleft out",
    ):
        shown.add_column(title, justify="right")
    for history in runs:
        for branch, back in zip(history.branches, history.rollbacks, strict=False):
            there = next((step for step in branch if step.step == back.onset), branch[-1])
            rates = [there.learning_rate * scale for scale in (back.lr_scale_before, back.lr_scale)]
            shown.add_row(
                name(history),
                str(back.onset),
                number(there.loss),
                f"step {back.checkpoint}" if back.known_good else "the start",
                " → ".join(f"{rate:.3g}" for rate in rates),
                ranges(back.batches),
            )
    return shown


def _ends(pairs: Sequence[tuple[History, History]], scenario: Scenario) -> Table:
    """The losses of both runs, side by side."""
    shown = Table(box=box.SIMPLE_HEAD, padding=0, header_style="bold")
    shown.add_column("")
    for title in ("unprotected", "healed"):
        for when in ("before the\nempty batch", "at the end,\nunseen text"):
            shown.add_column(f"{title}\n{when}", justify="right")
    for plain, healed in pairs:
        losses = [
            loss
            for run in (plain, healed)
            for loss in (run.mean_loss(scenario.empty), run.held_out_loss)
        ]
        shown.add_row(name(healed), *(number(loss) for loss in losses))
    return shown

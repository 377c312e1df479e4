"""The story of the runs in three acts, as a newcomer needs it."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from healcore.demo.history import History
from healcore.demo.rollbacks import Rollback
from healcore.demo.scenario import Scenario
from healcore.demo.table import number


def tell(console: Console, histories: Sequence[History], scenario: Scenario) -> None:
    """Prints the acts.

    Args:
        console: where.
        histories: finished runs.
        scenario: any seed's.
    """
    pairs = pairs_of(histories)
    many = len({healed.seed for _, healed in pairs}) > 1
    if not pairs:
        return
    console.print("\n[bold]Act 1: unprotected[/]")
    for plain, _ in pairs:
        console.print(f"  {_name(plain, many)}: {_fate(plain, scenario)}.", highlight=False)
    console.print("\n[bold]Act 2: a bad batch costs one step[/]")
    for _, healed in pairs:
        bad = {*scenario.corrupted, scenario.empty}
        skipped = [str(step.batch) for step in healed.kept if step.skip and step.batch in bad]
        console.print(
            f"  {_name(healed, many)}: skipped {', '.join(skipped) or 'none'}.", highlight=False
        )
    console.print("\n[bold]Act 3: the run diverges, and goes back[/]")
    console.print(_went_back([healed for _, healed in pairs], scenario, many))
    for plain, healed in pairs:
        console.print(
            f"  {_name(healed, many)}: loss on unseen text at the end "
            f"[bold]{number(healed.held_out_loss)}[/], unprotected "
            f"{number(plain.held_out_loss)}; before the empty batch "
            f"[bold]{number(healed.mean_loss(scenario.empty))}[/], unprotected "
            f"{number(plain.mean_loss(scenario.empty))}.",
            highlight=False,
        )


def pairs_of(histories: Sequence[History]) -> list[tuple[History, History]]:
    """(unprotected, healed) for every framework and seed that has both."""
    plain = {(one.framework, one.seed): one for one in histories if one.arm == "unprotected"}
    healed = [one for one in histories if one.arm == "healed"]
    return [
        (plain[one.framework, one.seed], one)
        for one in healed
        if (one.framework, one.seed) in plain
    ]


def _name(history: History, many: bool) -> str:
    return f"{history.framework} seed {history.seed}" if many else f"{history.framework:5}"


def _fate(plain: History, scenario: Scenario) -> str:
    worst = scenario.corpus.byte_frequency_loss
    calm = [one for one in plain.steps if one.step not in scenario.corrupted]
    lost = next((one for one in calm if one.step >= scenario.mistaken.start and not one.loss < worst), None)
    if lost is None:
        return "has not diverged"
    return (
        f"loss {number(lost.loss)} at step {lost.step}, "
        f"{number(plain.mean_loss(scenario.empty))} before the empty batch, "
        f"{number(plain.held_out_loss)} at the end"
    )


def _went_back(runs: Sequence[History], scenario: Scenario, many: bool) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, padding=0, header_style="bold")
    shown.add_column("", no_wrap=True)
    for name in (
        "alarm\nat step",
        "loss\nthere",
        "back to\nknown-good",
        "learning rate\nat that step",
        "batches\nleft out",
    ):
        shown.add_column(name, justify="right", no_wrap=True)
    for history in runs:
        for back in history.rollbacks:
            shown.add_row(
                _name(history, many),
                str(back.onset),
                number(loss_at(history, back)),
                str(back.checkpoint) + ("" if back.known_good else " (first)"),
                f"{rate(scenario, back, back.lr_scale_before)} → "
                f"{rate(scenario, back, back.lr_scale)}",
                ranges(back.batches),
            )
    return shown

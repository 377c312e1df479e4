"""The table at the end."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.table import Table

from healcore.core.verdict import Action
from healcore.demo.history import History
from healcore.demo.outcome import WANTED, Outcome, outcome
from healcore.demo.scenario import Scenario

_STYLES = {Outcome.TRAINED: "green", Outcome.NEITHER: "yellow", Outcome.FAILED: "red"}


def number(loss: float) -> str:
    """A loss between 2 and 1e13 in a few characters."""
    if not math.isfinite(loss):
        return "NaN" if math.isnan(loss) else "inf"
    return f"{loss:.2f}" if abs(loss) < 1000 else f"{loss:.0e}"


def table(histories: Sequence[History], scenario: Scenario) -> Table:
    """One row per run, as it came out.

    Args:
        histories: finished runs.
        scenario: any seed's; for the levels and the step of the NaN.
    """
    many = len({history.seed for history in histories}) > 1
    shown = Table(
        title="What became of the runs",
        title_style="bold",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        padding=0,
    )
    for name in ("", *(["seed"] if many else []), "run"):
        shown.add_column(name, no_wrap=True)
    for name in (
        "final\nloss",
        "before\nthe NaN",
        "spikes",
        "skips",
        "clips",
        "LR\ncuts",
        "roll-\nbacks",
    ):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column(" verdict", no_wrap=True)
    for history in histories:
        found = outcome(history, scenario.corpus)
        style = _STYLES[found]
        as_claimed = WANTED.get(history.arm) in (None, found)
        shown.add_row(
            history.framework,
            *([str(history.seed)] if many else []),
            history.arm,
            f"[{style}]{number(history.held_out_loss)}[/]",
            number(history.mean_loss(until=scenario.empty)),
            str(history.spikes),
            str(history.skips),
            str(history.clips),
            str(history.count(Action.CUT_LR)),
            str(len(history.rollbacks)),
            f" [{style}]{found.value}[/]" + ("" if as_claimed else " [bold]![/]"),
            end_section=history.arm == "healed",
        )
    return shown


def legend(scenario: Scenario) -> str:
    """What the columns mean; the two levels that decide the verdict are this text's own."""
    corpus = scenario.corpus
    return (
        "final loss: nats per byte on unseen text. Failed: not below "
        f"{corpus.byte_frequency_loss:.2f}, what byte frequencies alone give; trained: below "
        f"{corpus.byte_pair_loss:.2f}, what byte pairs give. before the NaN: mean training loss "
        "of the 20 steps before that batch. spikes: steps whose loss is a quarter above the "
        "median of the 25 before, or not finite."
    )

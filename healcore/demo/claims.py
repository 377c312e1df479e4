"""What the demo claims of its runs. Computed from the runs, so that a claim can be broken."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from healcore.demo.corpus import Corpus
from healcore.demo.runs import DemoRun, number
from healcore.demo.scenario import Scenario


class Outcome(enum.Enum):
    """Two levels of knowledge, counted from the text itself, separate the outcomes."""

    TRAINED = "trained"
    """Better than knowing which byte follows which: it uses context."""
    NEITHER = "in between"
    """Better than byte frequencies, no better than byte pairs; or stopped by the policy."""
    FAILED = "failed"
    """No better than knowing how frequent each byte is, or no number at all."""


class Claim(NamedTuple):
    """One claim about one run."""

    text: str
    """What is claimed, and the numbers that were found."""
    holds: bool


def outcome(run: DemoRun, corpus: Corpus) -> Outcome:
    """What became of one finished run."""
    loss = run.held_out_loss
    if not math.isfinite(loss) or loss >= corpus.byte_frequency_loss:
        return Outcome.FAILED
    if loss >= corpus.byte_pair_loss or run.ending == "stopped":
        return Outcome.NEITHER
    return Outcome.TRAINED


def claims(runs: Sequence[DemoRun], scenario: Scenario) -> list[Claim]:
    """Checks every claim. Of the runs with a fixed clip nothing is claimed.

    Args:
        runs: finished.
        scenario: any seed's.
    """
    found, corpus = [], scenario.corpus
    frequencies, pairs = f"{corpus.byte_frequency_loss:.2f}", f"{corpus.byte_pair_loss:.2f}"
    unprotected = {(run.framework, run.seed): run for run in runs if run.arm == "unprotected"}
    for run in runs:
        loss = number(run.held_out_loss)
        if run.arm == "unprotected":
            text = f"{run}: fails, no better than byte frequencies ({frequencies})"
            failed = outcome(run, corpus) is Outcome.FAILED
            found.append(Claim(f"{text} on unseen text: {loss}", failed))
        elif run.arm == "healed":
            text = f"{run}: trains, better than byte pairs ({pairs})"
            trained = run.held_out_loss < corpus.byte_pair_loss
            found.append(Claim(f"{text} on unseen text: {loss}", trained))
            completed = run.ending == "completed"
            found.append(Claim(f"{run}: runs to its end: {run.ending or 'not known'}", completed))
            if plain := unprotected.get((run.framework, run.seed)):
                found += _saved(plain, run, scenario)
    return found


def _saved(plain: DemoRun, healed: DemoRun, scenario: Scenario) -> Iterator[Claim]:
    """That going back has saved a run that had diverged, and that there was something to save."""
    before, without = healed.mean_loss(scenario.empty), plain.mean_loss(scenario.empty)
    ruined = not without < scenario.corpus.byte_frequency_loss
    yield Claim(f"{plain}: is ruined before the empty batch already: {number(without)}", ruined)
    better = before < (math.inf if math.isnan(without) else without)
    text = f"{healed}: is better off before the empty batch: {number(before)}"
    yield Claim(f"{text}, unprotected {number(without)}", better)
    backs = [back for back in healed.rollbacks if back["onset"] in scenario.mistaken]
    onsets = ", ".join(f"step {back['onset']}" for back in backs) or "never"
    text = f"{healed}: goes back while the learning rate is wrong: {onsets}"
    yield Claim(text, bool(backs))
    for back in backs:
        where = ", where it had started" if back["initial"] else ""
        text = f"{healed}: goes back to a known-good checkpoint: step {back['checkpoint']}{where}"
        yield Claim(text, not back["initial"])
        was, now = back["lr_scale_before"], back["lr_scale"]
        text = f"{healed}: goes on with a lower learning rate: × {now:g}, it was × {was:g}"
        yield Claim(text, now < was)

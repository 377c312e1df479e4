"""`remedy`: what is done about a trouble. One table, for every cause, as a pure function.

    try at this place   what is repeated
    -----------------   --------------------------------------------------------------------------
    1                   from the newest sound snapshot, inside of the envelope of its healthy time
    2                   the same from an older snapshot, and the suspect steps are frozen; once more
                        with more frozen steps if the damage came after them
    3                   weights finite: the program's own way is accepted, and the tries are undone;
                        not finite: an older snapshot, the rates at a quarter; then the run stops

What did not leave its range is not touched, so a repeat after damage that does not come back costs
no bit. A policy's own `[rollback]`, `[lr]` and `[budget]` are arguments of the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from healcore.runtime.run.envelope import Envelope
from healcore.runtime.run.trouble import RollbackRecord, Trouble, TroubleCause
from healcore.runtime.run.witness.recent_steps import STEPS_BEFORE_SIGN

MAX_ACCEPTED = 3
"""Troubles accepted in a row. After that, earlier weights that are better are only reported."""


class Outcome(StrEnum):
    """What is done."""

    REPEAT = "repeat"
    """A snapshot is restored, and the run repeats its steps in an envelope."""
    ACCEPT = "accept"
    """The program's own way is accepted: what the tries have changed is undone."""
    STOP = "stop"
    """The run stops with a diagnosis."""


class RateFact(StrEnum):
    """What is known of the learning rates at a trouble."""

    HEALTHY = "healthy"
    """All were within the healthy rates."""
    HIGHER = "higher"
    """One was above every healthy rate of its engine."""
    UNKNOWN = "unknown"
    """A rate is unknown, or no healthy rate of its engine is known."""


class Facts(NamedTuple):
    """What the table reads besides the trouble and the tries."""

    now: Envelope
    """What is held now."""
    outside: Envelope
    """What had left its healthy range since the snapshot and is not held yet."""
    snapshot: int
    """Step of the snapshot that a repeat would restore."""
    from_start: bool
    """Whether this snapshot is the first of the run, so that no rate was trained before it."""
    rate: RateFact
    """The learning rates at the trouble."""
    lr_cuts: int
    """Ceilings of the rate that the policy and the engines still allow for this trouble."""
    rollbacks_left: float
    """Rollbacks that the policy's budget allows for this trouble."""
    repeats_batches: bool
    """Whether a repeat reads the same batches. On other batches, damage that comes back says less
    about what was held, and no step is known to be suspect."""
    accepted: int
    """Troubles accepted in a row."""


@dataclass(frozen=True)
class Remedy:
    """What is done about a trouble."""

    outcome: Outcome
    envelope: Envelope
    """What is held from then on."""
    limits_rate: bool = False
    """Whether the rates get a ceiling: the last healthy rate, or a share of the rate at fault."""
    is_last: bool = False
    """Whether no other rollback is left: the rate of the snapshot then counts as healthy, also if
    it may be the start of a warm-up."""


def remedy(trouble: Trouble, tries: Sequence[RollbackRecord], facts: Facts) -> Remedy:
    """Chooses what is done about a trouble.

    Args:
        trouble: why the run goes back.
        tries: the rollbacks for this trouble so far, oldest first.
        facts: what else is known.

    Returns:
        The remedy. Each further try comes closer to `ACCEPT` or `STOP`, so a trouble has a bounded
        number of rollbacks: `lr_cuts`, three tries and the undoing one for weights that can be
        kept, the budget for others.
    """
    if facts.rollbacks_left <= 0:
        if trouble.finite:
            outcome = Outcome.ACCEPT
        else:
            outcome = Outcome.STOP
        return Remedy(outcome, facts.now)
    untouched = facts.now
    if tries:
        untouched = tries[0].before
    is_over = trouble.finite and any(each.accepts for each in tries)
    is_better = trouble.finite and trouble.cause is TroubleCause.BETTER_WEIGHTS
    is_one_of_many = is_better and not tries and facts.accepted >= MAX_ACCEPTED
    if is_over or is_one_of_many or trouble.cause is TroubleCause.INTENDED:
        return Remedy(Outcome.ACCEPT, untouched)

    limits = _limits_rate(trouble, tries, facts)
    envelope = facts.now.joined(facts.outside)
    if facts.from_start and limits:
        envelope = replace(envelope, is_guess=True)
    if trouble.exact:  # its batch is left out, and nothing else is a suspect
        return Remedy(Outcome.REPEAT, facts.now.joined(facts.outside))
    tries = [each for each in tries if not each.trouble.exact]
    if trouble.is_asked_for or not tries:
        return Remedy(Outcome.REPEAT, envelope, limits)
    is_last = facts.rollbacks_left <= 1
    may_help = _may_help(trouble, tries, facts)
    if limits or may_help:
        is_rate = limits and trouble.cause is TroubleCause.NO_FINITE_STEP
        if may_help and not is_rate and facts.repeats_batches and not tries[-1].lost:
            envelope = replace(envelope, frozen=_suspect_steps(trouble, tries, facts.snapshot))
        return Remedy(Outcome.REPEAT, envelope, limits, is_last)
    may_limit = facts.lr_cuts > 0
    # Bad data end all finite steps at the same step, whatever is held. A run that dies at several
    # steps is lost where it is accepted, so its rate is tried before.
    is_dead = trouble.cause is TroubleCause.NO_FINITE_STEP
    onsets = {trouble.onset, *(each.onset for each in tries)}
    was_limited = any(each.limits_rate for each in tries)
    tries_rate = is_dead and may_limit and not was_limited and len(onsets) > 1
    if trouble.finite and not tries_rate:
        return Remedy(Outcome.ACCEPT, untouched)
    return Remedy(Outcome.REPEAT, envelope, may_limit, is_last)


def _limits_rate(trouble: Trouble, tries: Sequence[RollbackRecord], facts: Facts) -> bool:
    """Whether the rates get a ceiling.

    A rate above every healthy rate gets one at once. A rate of which no healthy value is known is
    the last suspect, at the latest when one rollback is left for weights that are not finite. It is
    the first one at the start of the run if earlier weights are better, and the second one if no
    step is finite any more.
    """
    if facts.lr_cuts <= 0 or trouble.arrays:
        return False
    if trouble.is_asked_for:
        return bool(tries)
    if facts.rate is RateFact.HIGHER:
        return True
    if facts.from_start and trouble.cause is TroubleCause.BETTER_WEIGHTS:
        return True
    if not tries or facts.rate is not RateFact.UNKNOWN:
        return False
    if trouble.cause is TroubleCause.NO_FINITE_STEP:
        return True
    if not trouble.finite and facts.rollbacks_left <= 1:
        return True
    return not _may_help(trouble, tries, facts)


def _may_help(trouble: Trouble, tries: Sequence[RollbackRecord], facts: Facts) -> bool:
    """Whether the steps are repeated once more, with the suspect steps frozen.

    After one try they are, unless the damage is the program's own: the repeat has changed nothing,
    it came back, and nothing unusual is left. (Without a finite step the restored snapshot may have
    been damaged, so an older one is tried in any case.) After two tries they are if the damage came
    after the frozen steps: the fault lasts longer.
    """
    if len(tries) > 1:
        frozen = tries[-1].after.frozen
        return len(tries) == 2 and frozen is not None and trouble.found_at > frozen[1]
    if not trouble.finite or trouble.cause is TroubleCause.NO_FINITE_STEP or facts.outside:
        return True
    return tries[0].holds and facts.repeats_batches


def _suspect_steps(
    trouble: Trouble, tries: Sequence[RollbackRecord], snapshot: int
) -> tuple[int, int]:
    """First and last step to freeze: from the earliest onset to the latest evidence."""
    here = [each for each in tries if each.step >= trouble.onset]  # others are only in the region
    onset = min([trouble.onset, *(each.onset for each in here)])
    first = max(snapshot, onset - STEPS_BEFORE_SIGN)
    return first, max([first, trouble.found_at, *(each.step - 1 for each in here)])

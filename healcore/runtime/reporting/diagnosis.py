"""How a run has ended, live or killed: the facts, the findings as text, and the last line."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from healcore.console import counted, first_of
from healcore.core.decision import Cause
from healcore.events.kinds import Trait, has, sentence
from healcore.events.models import Ending, EventRecord
from healcore.history import Counts, RunHistory
from healcore.runtime.faults.failures import FAILURES, causes_of
from healcore.runtime.store.checkpoints import CheckpointInfo, StoreError

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run

_WIDTH = 96
_SHOWN = 5
_MAX_FAULTS = 10  # limit of the faults that a diagnosis lists, the newest ones

_FAULTS = Cause.OOM | Cause.DATA | Cause.NETWORK | Cause.HANG | Cause.UNKNOWN | Cause.WORKER
"""Causes of exceptions. A rollback is not a response to them."""

AFTER_A_KILL = (
    "look for the out-of-memory killer (dmesg), the scheduler's time limit or preemption, and the "
    "machine's own log"
)
"""Advice about a process that was killed."""

UNREPAIRED = (
    "healcore could not repair the damage. Check the learning rate, the data and what writes the "
    "weights at the step where the damage begins. If the program makes this change on purpose, "
    "nothing is wrong. (docs/how-it-decides.md)"
)
"""Advice about damage that was not repaired."""

_REPEATED = (
    "Rolling back did not help: more of the data is bad than was skipped, the learning rate is too "
    "high, or the cause is the model, its precision or its optimizer's settings, or is older than "
    "the checkpoints. (docs/lost-run.md)"
)
"""Advice after several rollbacks."""

STATES = {
    Ending.COMPLETED: "completed",
    Ending.STOPPED: "stopped by the policy",
    Ending.EXCEPTION: "ended by an exception",
    Ending.SIGNAL: "ended by a signal",
    Ending.REQUESTED: "ended on request",
    Ending.INTERRUPTED: "interrupted from the keyboard",
    Ending.KILLED: "killed",
    Ending.ENDED: "ended",
    Ending.GONE: "killed: the process is gone, and there is no end event",
    Ending.RUNNING: "still running",
    Ending.UNKNOWN: "unknown: still running, or killed",
}
"""State of a run -> clause."""

_ANSWERS = {
    "shrink_microbatch": "split the batch",
    "skip_batch": "skipped an unreadable batch",
    "retry": "repeated a network call",
}
"""Answer to a fault -> what was done."""


class RunOutcome(NamedTuple):
    """How a run has ended, and what is known about the run at its end.

    The diagnosis, the postmortem, the last line on the console and the `HealingReport` take their
    facts from here. A live run builds its outcome itself (`RunOutcome.of`). After a kill the
    next start builds the outcome from the files (`postmortem.write_for_killed`), so several fields
    may be unknown.
    """

    history: RunHistory
    """What happened in the run, from its events."""
    ending: str
    """Kind of the end, one of `Ending`."""
    step: int
    """Optimizer steps done."""
    counts: Counts
    """Counts of the whole run; lower limits if the run was killed."""
    why: str = ""
    """Reason of a stop, or name of the signal."""
    exception: str | None = None
    """The exception in one line, or None without an exception."""
    fault: Cause = Cause(0)
    """Cause of the exception, or 0 without an exception."""
    open: bool | None = None
    """Whether the last incident was open or the last step unhealthy, or None if unknown."""
    lasting: Cause = Cause(0)
    """Lasting causes of the last step, such as a plateau."""
    lr_scale: float = 1.0
    """Smallest multiplier of the learning rate of any engine, in (0, 1]."""
    newest: int | None = None
    """Step of the newest checkpoint on disk, or None without one."""
    last_good: int | None = None
    """Step of the newest known-good checkpoint on disk, or None without one. In memory if the store
    has no directory."""
    last_good_path: str | None = None
    """Directory of the checkpoint `last_good`."""
    nonfinite_saves: tuple[tuple[int, tuple[str, ...]], ...] = ()
    """Step and array names of each checkpoint with disallowed NaN or Inf."""
    metrics: Mapping[str, float] = MappingProxyType({})
    """`Healer.metrics` at the end."""
    steps_lost: int = 0
    """Steps that rollbacks have undone and that were not repeated: the data was not rewound."""
    unrepaired: tuple[int, ...] = ()
    """Onsets of the damage that the weights have: it came back after each rollback and was
    accepted, or no checkpoint could be restored."""

    @classmethod
    def of(cls, run: Run, ending: str, why: str = "", **fields: Any) -> RunOutcome:
        """Collects how a live run ends.

        Args:
            run: the parts of the run.
            ending: the kind of end.
            why: the reason of a stop, or the signal.
            **fields: more fields, such as the exception.
        """
        good, newest = run.saver.last_good_step, None
        found: CheckpointInfo | None = None
        try:
            listed = run.saver.listed()
        except StoreError:  # the end of a run must not fail because of its store
            listed = []
        for saved in listed:  # ascending
            if saved.path and not saved.is_abandoned:
                newest = saved.step
            # A full disk may lack the newest ones, which are in host memory only.
            outlives = saved.path is not None or not run.store.durable
            if good is not None and saved.is_usable and saved.step <= good and outlives:
                found = saved
        if listed:
            good = None if found is None else found.step
        return cls(
            run.log.history,
            ending,
            run.progress.step,
            run.monitor.counts(),
            why,
            open=run.monitor.is_unhealthy,
            lasting=run.monitor.lasting_causes,
            lr_scale=run.metrics.lr_scale,
            newest=newest,
            last_good=good,
            last_good_path=None if found is None else found.path,
            nonfinite_saves=tuple(run.saver.nonfinite),
            metrics=run.metrics.values(),
            steps_lost=sum(each.lost for each in run.ledger.rollbacks),
            unrepaired=tuple(run.ledger.damage_left),
            **fields,
        )

    @property
    def is_healthy(self) -> bool:
        """Whether the run is complete, without an open incident or NaN in a checkpoint."""
        trouble = self.open or self.nonfinite_saves or self.fault
        return self.ending == Ending.COMPLETED and not trouble

    @property
    def cause(self) -> Cause:
        """Cause of the last incident, or 0 without an incident."""
        numbered = [each for each in self.history.incidents if each.number]
        return causes_of(numbered[-1].cause) if numbered else Cause(0)


def last_line(outcome: RunOutcome) -> str:
    """Writes the last line of a run on the console.

    Args:
        outcome: how the run has ended.

    Returns:
        The line, for example "completed after step 500: skipped 1 step; checkpoint 500 is on disk".
    """
    phrases = ", ".join(interventions(outcome)) or "no intervention"
    clauses = [f"would have {phrases}" if outcome.history.observes else phrases]
    if outcome.unrepaired:
        clauses.insert(0, unrepaired_text(outcome.unrepaired))
    if outcome.steps_lost:
        clauses.append(_lost_steps_text(outcome))
    if outcome.newest is not None:
        clauses.append(f"checkpoint {outcome.newest} is on disk")
    if not outcome.is_healthy:  # an earlier one may be needed
        if outcome.last_good is not None:
            clauses.append(f"newest known-good checkpoint: step {outcome.last_good}")
        elif outcome.open or outcome.nonfinite_saves or outcome.ending == Ending.STOPPED:
            clauses.append("no checkpoint is known-good")
    return f"{_headline(outcome)}: {'; '.join(clauses)}"


def explain(outcome: RunOutcome) -> str:
    """Writes the diagnosis for a person: a headline, then the findings.

        ended by an exception after step 412
        Exception: ValueError: ...
        Fault: step 240: nonfinite loss; last finite loss 2.1; skipped; epoch 0 batch 240
        Tried: skipped 1 step
        Check: The loss itself was NaN or Inf. ... (docs/faults.md#nan_loss)
        Last known-good: the checkpoint of step 300, in runs/7/step-300

    Args:
        outcome: how the run has ended.

    Returns:
        The text. The findings have lines of at most 96 characters except for paths.
    """
    findings = (
        textwrap.fill(
            text, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
        for text in _findings(outcome)
    )
    return "\n".join([_headline(outcome), *findings])


def _headline(outcome: RunOutcome) -> str:
    """How the run has ended, and after which step: "completed after step 500"."""
    text = STATES[Ending(outcome.ending)]
    if outcome.ending == Ending.REQUESTED and outcome.why:
        text = f"ended by {outcome.why}"
    elif outcome.ending == Ending.EXCEPTION and outcome.why:
        text = f"ended incomplete ({outcome.why})"
    elif outcome.why:
        text += f" ({outcome.why})"
    more = " or later" if outcome.ending == Ending.KILLED else ""
    return f"{text} after step {outcome.step}{more}"


def _findings(outcome: RunOutcome) -> Iterator[str]:
    """What a person should know about the end of a run. What is not known has no finding."""
    history = outcome.history
    if outcome.exception:
        yield f"Exception: {outcome.exception}"
    if outcome.unrepaired:
        yield f"Not healed: {unrepaired_text(outcome.unrepaired)}"
    found = faults_found(history)
    if len(found) > _MAX_FAULTS:
        yield f"Fault: {len(found) - _MAX_FAULTS:,} earlier ones"
    for event in found[-_MAX_FAULTS:]:
        norms = [f"{tensor.name} ({tensor.grad_norm:.3g})" for tensor in event.evidence or ()]
        gradients = f"; unusual gradients: {first_of(norms, _SHOWN)}" if norms else ""
        yield f"Fault: step {event.step}: {sentence(event)}{gradients}"
    tried = interventions(outcome)
    if history.observes:
        tried = ["nothing: the policy only observes"]
    elif outcome.lr_scale < 1:
        tried.append(f"learning rate × {outcome.lr_scale:.3g} at the end")
    if outcome.steps_lost:
        tried.append(_lost_steps_text(outcome))
    if tried:
        at_least = " (at least)" if outcome.ending == Ending.KILLED else ""
        yield f"Tried: {'; '.join(tried)}{at_least}"
    yield from (f"Check: {hint}" for hint in hints(outcome))
    good = "none (docs/checkpoints.md)"
    if outcome.last_good is not None:
        good = f"the checkpoint of step {outcome.last_good}"
        if outcome.unrepaired and outcome.last_good > outcome.unrepaired[0]:
            good += " (saved after the damage began, so its weights may be damaged)"
        if outcome.last_good_path:
            good += f", in {outcome.last_good_path}"
    yield f"Last known-good: {good}"


def hints(outcome: RunOutcome) -> list[str]:
    """Collects the advice for a person, about this run first, then about its causes."""
    history = outcome.history
    # Of alarms about which nothing was done: only a person can act on them.
    cause = outcome.lasting
    for names in history.alarms_outside(undone=False).values():
        cause |= causes_of(names)
    if not outcome.is_healthy:
        cause |= outcome.cause | outcome.fault
    found = advice(cause)
    if outcome.unrepaired:
        found.insert(0, UNREPAIRED)
    if cause & ~_FAULTS and not outcome.is_healthy and len(history.rollbacks) > 1:
        found.append(_REPEATED)
    if outcome.ending == Ending.KILLED:
        found.append(f"The process could not record why it was killed: {AFTER_A_KILL}.")
    return found


def advice(cause: Cause) -> list[str]:
    """What a person should look at: the diagnosis of each cause, and the page about it."""
    rows = [row for flag, row in FAILURES.items() if flag in cause]
    return [f"{row.diagnosis} (docs/faults.md#{row.name})" for row in rows]


def faults_found(history: RunHistory) -> list[EventRecord]:
    """The events that a person should know of, oldest first.

    These are the events on which trackers alert, the first alarm of each incident, and the damage
    that is kept or of which nothing is left. The headline has the stop, or the exception.
    """
    found: list[EventRecord] = []
    incidents: set[int | None] = {None, 0}
    for event in history.events:
        begins = event.kind == "alarm" and (event.alert or event.incident not in incidents)
        incidents.add(event.incident)
        ends = event.kind == "stop" or (event.kind == "fault" and event.answer in (None, "save"))
        severe = has(event.kind, Trait.SEVERE) and not ends
        if begins or severe or event.verdict in ("accepted", "recovered"):
            found.append(event)
    return found


# -- clauses --------------------------------------------------------------------------------------


def unrepaired_text(onsets: Sequence[int]) -> str:
    """Describes damage that was not repaired, by the steps at which it begins (at least one)."""
    return f"damage since step {first_of([*map(str, onsets)], _SHOWN)} was not repaired"


def _lost_steps_text(outcome: RunOutcome) -> str:
    """A clause about the steps that rollbacks have undone and that were not repeated."""
    total = outcome.step + outcome.steps_lost
    return f"{outcome.steps_lost:,} of {total:,} steps were not repeated"


def interventions(outcome: RunOutcome) -> list[str]:
    """Lists what was done in a run.

    Args:
        outcome: how the run has ended.

    Returns:
        A phrase for each kind of intervention, for example "skipped 3 steps".
    """
    counts, history = outcome.counts, outcome.history
    # The changes for damage that was not repaired are undone.
    rollbacks = [each for each in history.rollbacks if each.onset not in outcome.unrepaired]
    answers = [event.answer for event in history.of("fault")]
    done = [
        ("skipped", counts.skips, "step", ""),
        ("left out", sum(len(each.batches or ()) for each in rollbacks), "batch", "batches"),
        ("clipped", counts.clips, "step", ""),
        ("lowered the learning rate", counts.lr_cuts, "time", ""),
        *((text, answers.count(answer), "time", "") for answer, text in _ANSWERS.items()),
        ("rolled back", counts.rollbacks, "time", ""),
    ]
    phrases = [f"{what} {counted(number, *noun)}" for what, number, *noun in done if number]
    return [phrase.replace(" 1 time", " once") for phrase in phrases]

"""How a run has ended: the facts, the findings as text, and the last line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

_SHOWN = 5
_MAX_FAULTS = 10  # limit of the faults that a diagnosis lists, the newest ones

_FAULTS = Cause.OOM | Cause.DATA | Cause.NETWORK | Cause.HANG | Cause.UNKNOWN | Cause.WORKER
"""Causes of exceptions. A rollback is not a response to them."""

_UNREPAIRED = (
    "healcore could not repair the damage. Check the learning rate, the data and what writes the "
    "weights at the step where the damage begins. If the program makes this change on purpose, "
    "nothing is wrong. (docs/how-it-decides.md)"
)
_REPEATED = (
    "Rolling back did not help: more of the data is bad than was skipped, the learning rate is too "
    "high, or the cause is the model, its precision or its optimizer's settings, or is older than "
    "the checkpoints. (docs/lost-run.md)"
)

_AFTER_A_KILL = (
    "Look for the out-of-memory killer (dmesg), the scheduler's time limit or preemption, and the "
    "machine's own log."
)

STATES = {
    Ending.COMPLETED: "completed",
    Ending.STOPPED: "stopped by the policy",
    Ending.EXCEPTION: "ended by an exception",
    Ending.SIGNAL: "ended by a signal",
    Ending.REQUESTED: "ended on request",
    Ending.INTERRUPTED: "interrupted from the keyboard",
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
    facts from here.
    """

    history: RunHistory
    """What happened in the run, from its events."""
    ending: str
    """Kind of the end, one of `Ending`."""
    step: int
    """Optimizer steps done."""
    counts: Counts
    """Counts of the whole run."""
    why: str = ""
    """Reason of a stop, or name of the signal."""
    exception: str | None = None
    """The exception in one line, or None without an exception."""
    fault: Cause = Cause(0)
    """Cause of the exception, or 0 without an exception."""
    open: bool = False
    """Whether the last incident was open or the last step unhealthy."""
    healthy: bool = False
    """Whether the run is complete, without an open incident or NaN in a checkpoint."""
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
    metrics: Mapping[str, float] = MappingProxyType({})
    """`Healer.metrics` at the end."""
    steps_lost: int = 0
    """Steps that rollbacks have undone and that were not repeated: the data was not rewound."""
    unrepaired: tuple[int, ...] = ()
    """Onsets of the damage that the weights have: it came back after each rollback and was
    accepted, or no checkpoint could be restored."""

    @classmethod
    def of(cls, run: Run, ending: str, why: str = "", **fields: Any) -> RunOutcome:
        """Collects how a run ends.

        Args:
            run: the parts of the run.
            ending: the kind of end.
            why: the reason of a stop, or the signal.
            **fields: more fields: the exception and its cause.
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
        path = None
        if found is not None:
            path = found.path
        if listed:
            good = None
            if found is not None:
                good = found.step
        unhealthy = run.monitor.is_unhealthy
        damaged = unhealthy or run.saver.nonfinite or fields.get("fault")
        return cls(
            run.log.history,
            ending,
            run.progress.step,
            run.monitor.counts(),
            why,
            open=unhealthy,
            healthy=ending == Ending.COMPLETED and not damaged,
            lasting=run.monitor.lasting_causes,
            lr_scale=run.metrics.lr_scale,
            newest=newest,
            last_good=good,
            last_good_path=path,
            metrics=run.metrics.values(),
            steps_lost=sum(each.lost for each in run.ledger.rollbacks),
            unrepaired=tuple(run.ledger.damage_left),
            **fields,
        )

    @property
    def cause(self) -> Cause:
        """Cause of the last incident, or 0 without an incident."""
        numbered = [each for each in self.history.incidents if each.number]
        if not numbered:
            return Cause(0)
        return causes_of(numbered[-1].cause)


def last_line(outcome: RunOutcome) -> str:
    """Writes the last line of a run on the console.

    Args:
        outcome: how the run has ended.

    Returns:
        The line, for example "completed after step 500: skipped 1 step; checkpoint 500 is on disk".
    """
    phrases = ", ".join(interventions(outcome)) or "no intervention"
    if outcome.history.observes:
        phrases = f"would have {phrases}"
    clauses = [phrases]
    if outcome.unrepaired:
        clauses.insert(0, unrepaired_text(outcome.unrepaired))
    if outcome.steps_lost:
        clauses.append(_lost_steps_text(outcome))
    if outcome.newest is not None:
        clauses.append(f"checkpoint {outcome.newest} is on disk")
    if not outcome.healthy:  # an earlier one may be needed
        if outcome.last_good is not None:
            clauses.append(f"newest known-good checkpoint: step {outcome.last_good}")
        elif outcome.ending in (Ending.COMPLETED, Ending.STOPPED):
            clauses.append("no checkpoint is known-good")
    return f"{_headline(outcome)}: {'; '.join(clauses)}"


def explain(outcome: RunOutcome) -> str:
    """Writes the diagnosis for a person: a headline, then a line for each finding.

        ended by an exception after step 412
        Exception: ValueError: ...
        Fault: step 240: nonfinite loss; last finite loss 2.1; skipped; epoch 0 batch 240
        Tried: skipped 1 step
        Check: The loss itself was NaN or Inf. ... (docs/faults.md#nan_loss)
        Last known-good: the checkpoint of step 300, in runs/7/step-300

    Args:
        outcome: how the run has ended.
    """
    history, lines = outcome.history, [_headline(outcome)]
    if outcome.exception:
        lines.append(f"Exception: {outcome.exception}")
    if outcome.unrepaired:
        lines.append(f"Not healed: {unrepaired_text(outcome.unrepaired)}")
    found = faults_found(history)
    if len(found) > _MAX_FAULTS:
        lines.append(f"Fault: {len(found) - _MAX_FAULTS:,} earlier ones")
    for event in found[-_MAX_FAULTS:]:
        norms = [f"{tensor.name} ({tensor.grad_norm:.3g})" for tensor in event.evidence or ()]
        line = f"Fault: step {event.step}: {sentence(event)}"
        if norms:
            line += f"; unusual gradients: {first_of(norms, _SHOWN)}"
        lines.append(line)
    tried = interventions(outcome)
    if history.observes:
        tried = ["nothing: the policy only observes"]
    elif outcome.lr_scale < 1:
        tried.append(f"learning rate × {outcome.lr_scale:.3g} at the end")
    if outcome.steps_lost:
        tried.append(_lost_steps_text(outcome))
    if tried:
        lines.append(f"Tried: {'; '.join(tried)}")
    lines += [f"Check: {hint}" for hint in hints(outcome)]
    if outcome.ending in (Ending.GONE, Ending.UNKNOWN):  # the store may have other checkpoints now
        return "\n".join([*lines, f"Check: {_AFTER_A_KILL}"])
    good = "none (docs/checkpoints.md)"
    if outcome.last_good is not None:
        good = f"the checkpoint of step {outcome.last_good}"
        if outcome.unrepaired and outcome.last_good > outcome.unrepaired[0]:
            good += " (saved after the damage began, so its weights may be damaged)"
        if outcome.last_good_path:
            good += f", in {outcome.last_good_path}"
    return "\n".join([*lines, f"Last known-good: {good}"])


def _headline(outcome: RunOutcome) -> str:
    """How the run has ended, and after which step: "completed after step 500"."""
    text = STATES[Ending(outcome.ending)]
    if outcome.ending == Ending.REQUESTED and outcome.why:
        text = f"ended by {outcome.why}"
    elif outcome.ending == Ending.EXCEPTION and outcome.why:
        text = f"ended incomplete ({outcome.why})"
    elif outcome.why:
        text += f" ({outcome.why})"
    return f"{text} after step {outcome.step}"


def hints(outcome: RunOutcome) -> list[str]:
    """Collects the advice for a person, about this run first, then about its causes."""
    history, cause = outcome.history, outcome.lasting
    for event in history.of("alarm"):
        if not event.incident:  # nothing was done: only a person can act
            cause |= causes_of(event.cause or ())
    if not outcome.healthy:
        cause |= outcome.cause | outcome.fault
    found = advice(cause)
    if outcome.unrepaired:
        found.insert(0, _UNREPAIRED)
    if cause & ~_FAULTS and not outcome.healthy and len(history.of("rollback")) > 1:
        found.append(_REPEATED)
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
    """Lists what was done in a run: a phrase for each kind, for example "skipped 3 steps"."""
    counts, history = outcome.counts, outcome.history
    left_out = 0
    for rollback in history.of("rollback"):
        if rollback.onset not in outcome.unrepaired:  # otherwise its changes are undone
            left_out += len(rollback.batches or ())
    answers = [event.answer for event in history.of("fault")]
    done = [
        ("skipped", counts.skips, "step", ""),
        ("left out", left_out, "batch", "batches"),
        ("clipped", counts.clips, "step", ""),
        ("lowered the learning rate", counts.lr_cuts, "time", ""),
        *((text, answers.count(answer), "time", "") for answer, text in _ANSWERS.items()),
        ("rolled back", counts.rollbacks, "time", ""),
    ]
    phrases = [f"{what} {counted(number, *noun)}" for what, number, *noun in done if number]
    return [phrase.replace(" 1 time", " once") for phrase in phrases]

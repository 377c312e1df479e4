"""How a run has ended, live or killed: the facts, their diagnosis as text, and the last line."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from healcore.console import counted, first_of
from healcore.core.decision import Cause, names_of
from healcore.events.kinds import batch_names, flags_text, readings_text, sentence
from healcore.events.models import Ending
from healcore.history import Counts, Incident, Mode, RunHistory, RunState
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
    RunState.COMPLETED: "completed",
    RunState.STOPPED: "stopped by the policy",
    RunState.EXCEPTION: "ended by an exception",
    RunState.SIGNAL: "ended by a signal",
    RunState.REQUESTED: "ended on request",
    RunState.INTERRUPTED: "interrupted from the keyboard",
    RunState.KILLED: "killed",
    RunState.ENDED: "ended",
    RunState.GONE: "killed: the process is gone, and there is no end event",
    RunState.RUNNING: "still running",
    RunState.UNKNOWN: "unknown: still running, or killed",
}
"""State of a run -> clause."""

_HEADLINES = {
    Ending.COMPLETED: "The run is complete {}.",
    Ending.STOPPED: "healcore stopped the run {}.",
    Ending.EXCEPTION: "The program raised an exception {}",
    Ending.SIGNAL: "The run was ended from outside {}.",
    Ending.REQUESTED: "The run was ended on request {}.",
    Ending.INTERRUPTED: "The run was interrupted from the keyboard {}.",
    Ending.KILLED: "The process was killed without notice; its last record is {}. It could not "
    f"record why: {AFTER_A_KILL}.",
}


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
    def of(cls, run: Run, ending: Ending, why: str = "", **fields: Any) -> RunOutcome:
        """Collects how a live run ends.

        Args:
            run: the parts of the run.
            ending: the kind of end.
            why: the reason of a stop, or the signal.
            **fields: more fields, such as the exception.
        """
        good = run.saver.last_good_step
        found: CheckpointInfo | None = None
        listed = listed_checkpoints(run)
        for saved in listed:  # ascending
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
            lr_scale=run.rate_log.lr_scale,
            last_good=good,
            last_good_path=None if found is None else found.path,
            nonfinite_saves=tuple(run.saver.nonfinite),
            metrics=run.monitor.metrics.values(),
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
        last = self.history.last_incident
        return Cause(0) if last is None else causes_of(last.cause)


def listed_checkpoints(run: Run) -> list[CheckpointInfo]:
    """The checkpoints with their statuses, or an empty list if the store cannot be read.

    For texts about the run's end, which must not fail because of the store.

    Args:
        run: the parts of the run.
    """
    try:
        return run.saver.listed()
    except StoreError:
        return []


def explain(outcome: RunOutcome) -> str:
    """Writes the diagnosis for a person: a headline, then the findings.

        The program raised an exception at step 412: ValueError: ...
        Fault: step 240: nonfinite loss; loss 2.1; epoch 0 batch 240. Skipped 1 step.
        Fault: steps 398 to 411: loss spike; loss 9.1; epoch 0 batch 398. Skipped 1 step.
        Tried: skipped 2 steps
        Check: The loss rose far above its level. ... (docs/faults.md#loss_spike)
        Last known-good: the checkpoint of step 300, in runs/7/step-300

    Args:
        outcome: how the run has ended.

    Returns:
        The text, in lines of at most 96 characters except for paths.
    """
    because = outcome.exception if outcome.ending == Ending.EXCEPTION else outcome.why
    at = f"at step {outcome.step}" + (f": {because}" if because else "")
    headline = _HEADLINES[Ending(outcome.ending)].format(at)
    if outcome.ending in (Ending.EXCEPTION, Ending.KILLED):
        headline = _wrapped(headline)
    return "\n".join([headline, *(_wrapped(": ".join(each)) for each in _findings(outcome))])


def _findings(outcome: RunOutcome) -> Iterator[tuple[str, str]]:
    """What a person should know about the end of a run: what each finding is about, and its text.

    What is not known has no finding.
    """
    history = outcome.history
    if outcome.unrepaired:
        accepted = [each.why for each in history.of("assessment") if each.verdict == "accepted"]
        why = filter(None, [unrepaired_text(outcome.unrepaired), *accepted[-1:]])
        yield "Not healed", ": ".join(why)
    for event in history.of("assessment"):
        if event.verdict == "recovered" and event.why:
            yield "Recovered", sentence(event)
    if outcome.nonfinite_saves:
        step, arrays = outcome.nonfinite_saves[0]
        saves = counted(len(outcome.nonfinite_saves), "checkpoint")
        text = f"NaN or Inf in {first_of(arrays, _SHOWN)}, in {saves} since step {step}"
        if outcome.nonfinite_saves[-1][0] == outcome.step:
            text += ". The run ends in that state"
        yield "State", text
    found = faults_found(history)
    if len(found) > _MAX_FAULTS:
        yield "Fault", f"{len(found) - _MAX_FAULTS:,} earlier ones"
    for _, fault in found[-_MAX_FAULTS:]:
        yield "Fault", fault
    tried = interventions(outcome)
    if history.observes:
        tried = ["nothing: the policy only observes"]
    elif outcome.lr_scale < 1:
        tried.append(f"learning rate × {outcome.lr_scale:.3g} at the end")
    if outcome.steps_lost:
        tried.append(lost_steps_text(outcome))
    if tried:
        at_least = " (at least)" if outcome.ending == Ending.KILLED else ""
        yield "Tried", "; ".join(tried) + at_least
    for hint in hints(outcome):
        yield "Check", hint
    good = "none (docs/checkpoints.md)"
    if outcome.last_good is not None:
        good = f"the checkpoint of step {outcome.last_good}"
        if outcome.unrepaired and outcome.last_good > outcome.unrepaired[0]:
            good += " (saved after the damage began, so its weights may be damaged)"
        if outcome.last_good_path:
            good += f", in {outcome.last_good_path}"
    yield "Last known-good", good


def hints(outcome: RunOutcome) -> list[str]:
    """Collects the advice for a person, about this run first, then about its causes."""
    # Of alarms about which nothing was done: only a person can act on them.
    cause = outcome.lasting
    for names in outcome.history.alarms_outside(undone=False).values():
        cause |= causes_of(names)
    found = [UNREPAIRED] if outcome.unrepaired else []
    if outcome.is_healthy:
        return found + advice(cause)
    cause |= outcome.cause | outcome.fault
    return found + advice(cause, rollbacks=len(outcome.history.rollbacks))


def advice(cause: Cause, *, rollbacks: int = 0) -> list[str]:
    """Collects what a person should look at.

    Args:
        cause: causes of the trouble.
        rollbacks: rollbacks of the run. After several of them, another rollback does not help.

    Returns:
        The diagnosis of each cause and the page about it, in the order of `FAILURES`.
    """
    found: list[str] = []
    for flag, row in FAILURES.items():
        if flag in cause:
            found.append(f"{row.diagnosis} (docs/faults.md#{row.name})")
    if cause & ~_FAULTS and rollbacks > 1:
        found.append(_REPEATED)
    return found


# -- faults ---------------------------------------------------------------------------------------


def faults_found(history: RunHistory) -> list[tuple[float, str]]:
    """Lists the faults of a run: incidents, alarms that changed nothing, exceptions with an answer.

    Alarms outside of incidents are one fault for each cause. Alarms that a rollback has undone are
    not listed: the final weights do not depend on them.

    Args:
        history: what happened in the run.

    Returns:
        The first step of each fault, and what it was, what was measured, the remedy and the steps
        that it cost; in the order of the first steps.
    """
    faults: list[tuple[float, str]] = []
    for incident in history.incidents:
        text = f"{_steps_text(incident.onset_step, incident.end)}: {_seen(incident)}"
        faults.append((incident.onset_step, f"{text}. {'. '.join(_remedies(incident))}."))
    alarms: dict[tuple[str, ...], list[float]] = {}
    for step, causes in sorted(history.alarms_outside(undone=False).items()):
        alarms.setdefault(causes, []).append(step)
    for causes, steps in alarms.items():
        text = f"{_steps_text(steps[0], steps[-1])}: {flags_text(causes)}"
        if len(steps) > 1:
            text += f" at {len(steps):,} steps"
        faults.append((steps[0], f"{text}. No remedy: an alarm alone changes nothing."))
    for event in history.of("fault"):
        if event.answer not in (None, "save"):  # otherwise it ended the run, see the headline
            text = sentence(event).removeprefix("fault: ")
            faults.append((event.step or 0, f"step {event.step}: {text}."))
    return sorted(faults)


def _steps_text(first: float, last: float) -> str:
    """A range of steps as text: "step 7" or "steps 7 to 12"."""
    return f"step {first:.0f}" if first == last else f"steps {first:.0f} to {last:.0f}"


def _seen(incident: Incident) -> str:
    """What was wrong in an incident, and what was measured."""
    clauses = [incident_cause_text(incident)]
    if incident.readings is not None:
        clauses.append(readings_text(incident.readings, incident.cause))
    if incident.evidence:
        norms = [f"{tensor.name} ({tensor.grad_norm:.3g})" for tensor in incident.evidence]
        clauses.append(f"unusual gradients: {first_of(norms, _SHOWN)}")
    clauses.append(first_of(batch_names(incident.batches, incident.rows), _SHOWN))
    return "; ".join(filter(None, clauses))


_FOUND_BY = {
    "earlier_weights": "earlier weights were better on the same batches",
    "nonfinite_steps": "no finite step any more",
    "intended_numbers": "a change that the program makes on purpose",
    "state": "a save with NaN or Inf",
}
"""`EventRecord.by` of a rollback without an alarm -> what was wrong."""


def incident_cause_text(incident: Incident) -> str:
    """Describes what was wrong in an incident.

    Args:
        incident: the incident, or a rollback without an alarm.

    Returns:
        Its causes, such as "nonfinite loss". Without an alarm, why the run was rolled back.
    """
    if incident.cause:
        return flags_text(incident.cause)
    for event in incident.responses:
        if event.by:
            return event.problem or _FOUND_BY.get(event.by, event.by)
    return "a rollback without an alarm"


def _remedies(incident: Incident) -> list[str]:
    """What was done about an incident, as sentences without their full stop."""
    phrases: list[str] = []
    if incident.skipped:
        more = " or more" if incident.capped else ""
        phrases.append(f"skipped {counted(incident.skipped, 'step')}{more}")
    for event in incident.responses:
        if event.kind != "stop":  # the headline has its reason
            phrases.append(sentence(event))
    if incident.undone_by is not None and not incident.rolled_back:
        phrases.append(f"undone by the rollback from step {incident.undone_by.step or 0}")
    if incident.mode is Mode.OBSERVE:
        phrases = [f"only observed: {phrase}" for phrase in phrases]
    return [phrase[:1].upper() + phrase[1:] for phrase in phrases or ["training continued"]]


# -- clauses --------------------------------------------------------------------------------------


def lasting_text(outcome: RunOutcome) -> str:
    """Describes the lasting causes at the end of a run.

    Args:
        outcome: how the run has ended; `lasting` is not empty.

    Returns:
        A clause, for example "plateau at the end".
    """
    return f"{flags_text(names_of(outcome.lasting))} at the end"


def unrepaired_text(onsets: Sequence[int]) -> str:
    """Describes damage that was not repaired, by the steps at which it begins (at least one)."""
    return f"damage since step {first_of([*map(str, onsets)], _SHOWN)} was not repaired"


def lost_steps_text(outcome: RunOutcome) -> str:
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
    declined = [event for event in history.of("assessment") if event.verdict == "unknown"]
    done = (
        (counts.skips, "skipped {}", "step", "steps"),
        (sum(len(event.batches or ()) for event in rollbacks), "left out {}", "batch", "batches"),
        (counts.clips, "clipped {}", "step", "steps"),
        (counts.lr_cuts, "lowered the learning rate {}", "time", "times"),
        (answers.count("shrink_microbatch"), "split the batch {}", "time", "times"),
        (answers.count("skip_batch"), "skipped {}", "unreadable batch", "unreadable batches"),
        (answers.count("retry"), "repeated a network call {}", "time", "times"),
        (len(declined), "declined {}", "rollback", "rollbacks"),
        (counts.rollbacks, "rolled back {}", "time", "times"),
    )
    phrases: list[str] = []
    for number, phrase, one, several in done:
        if number:
            words = counted(number, one, several)
            phrases.append(phrase.format("once" if words == "1 time" else words))
    return phrases


def last_line(outcome: RunOutcome, newest: int | None) -> str:
    """Writes the last line of a run on the console.

    Args:
        outcome: how the run has ended.
        newest: step of the newest checkpoint on disk, or None without one.

    Returns:
        The line, for example "completed after step 500: skipped 1 step; checkpoint 500 is on disk".
    """
    text = STATES[RunState(outcome.ending)]
    if outcome.ending == Ending.REQUESTED:
        text = f"ended by {outcome.why}"
    elif outcome.ending == Ending.STOPPED:
        text += f" ({outcome.why})"
    elif outcome.ending == Ending.EXCEPTION and outcome.why:
        text = f"ended incomplete ({outcome.why})"
    phrases = interventions(outcome)
    if outcome.history.observes:
        phrases = [f"would have {phrase}" for phrase in phrases]
    clauses = [", ".join(phrases) or "no intervention"]
    if outcome.unrepaired:
        clauses.insert(0, unrepaired_text(outcome.unrepaired))
    if outcome.steps_lost:
        clauses.append(lost_steps_text(outcome))
    if newest is not None:
        clauses.append(f"checkpoint {newest} is on disk")
    if not outcome.is_healthy:  # an earlier one may be needed
        if outcome.last_good is not None:
            clauses.append(f"newest known-good checkpoint: step {outcome.last_good}")
        elif outcome.open or outcome.nonfinite_saves or outcome.ending == Ending.STOPPED:
            clauses.append("no checkpoint is known-good")
    return f"{text} after step {outcome.step}: {'; '.join(clauses)}"


def _wrapped(text: str) -> str:
    """Wraps a finding. A path stays whole."""
    return textwrap.fill(
        text, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )

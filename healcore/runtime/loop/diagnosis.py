"""Collects what is known of a run at its end: the input of a diagnosis."""

from __future__ import annotations

from collections.abc import Sequence

from healcore.core.step_record import Readings
from healcore.core.verdict import Cause
from healcore.runtime.checkpoints.manager import CheckpointManager
from healcore.runtime.incidents.monitor import IncidentMonitor
from healcore.runtime.postmortem.diagnosis import Case, Tried
from healcore.runtime.store import StoreError


def build_case(
    monitor: IncidentMonitor,
    checkpoints: CheckpointManager,
    *,
    ending: str,
    step: int,
    rollbacks: Sequence[Tried],
    verdict: str,
    why: str = "",
    exception: str | None = None,
) -> Case:
    """Builds the case of a run.

    Args:
        monitor: of the run, with the ledger.
        checkpoints: of the run.
        ending: `completed`, `stopped`, `exception`, `signal` or `interrupted`.
        step: steps done.
        rollbacks: of this process.
        verdict: of the last re-run.
        why: the reason, in a few words.
        exception: what was raised, as text.
    """
    ledger, alarm = monitor.ledger, monitor.first_alarm
    last = ledger.incidents[-1] if ledger.incidents else None
    return Case(
        ending=ending,
        step=step,
        why=why,
        cause=Cause(0 if last is None else last.cause),
        onset=None if last is None else last.onset,
        open=ledger.open,
        incidents=ledger.incident_count,
        readings=Readings(*alarm.readings) if alarm is not None else None,
        evidence=() if alarm is None else alarm.evidence,
        batches=() if alarm is None else alarm.batches,
        skips=sum(each.skips for each in ledger.incidents),
        tried=tuple(rollbacks),
        lr_scale=monitor.lr_scale,
        verdict=verdict,
        damaged=tuple(checkpoints.damaged),
        damaged_in_memory=tuple(checkpoints.damaged_in_memory),
        not_finite=tuple(checkpoints.nonfinite),
        unsaved=checkpoints.failures,
        unsaved_why=checkpoints.last_failure,
        observes=monitor.policy.observes,
        last_good=checkpoints.good,
        path=_path(checkpoints),
        exception=exception,
    )


def _path(checkpoints: CheckpointManager) -> str | None:
    try:
        saves = checkpoints.listed()
    except StoreError:
        return None
    return next((each.path for each in saves if each.step == checkpoints.good), None)

"""What a run's parts say about its end: the case that a diagnosis is made from."""

from __future__ import annotations

from collections.abc import Sequence

from healcore.core.step_record import Readings
from healcore.core.verdict import Cause
from healcore.runtime.checkpoints.manager import CheckpointManager
from healcore.runtime.incidents.judge import Judge
from healcore.runtime.postmortem.diagnosis import Case, Tried
from healcore.runtime.store import StoreError


def case_of(
    judge: Judge,
    checkpoints: CheckpointManager,
    *,
    ending: str,
    step: int,
    tried: Sequence[Tried],
    verdict: str,
    why: str = "",
    exception: str | None = None,
) -> Case:
    """The case.

    Args:
        judge: with the ledger.
        checkpoints: of the checkpoints.
        ending: `completed`, `stopped`, `exception`, `signal` or `interrupted`.
        step: steps done.
        tried: rollbacks.
        verdict: of the last re-run.
        why: what ended it, in a few words.
        exception: what was raised, as text.
    """
    ledger, worst = judge.ledger, judge.worst
    last = ledger.episodes[-1] if ledger.episodes else None
    return Case(
        ending=ending,
        step=step,
        why=why,
        cause=Cause(0 if last is None else last.cause),
        onset=None if last is None else last.onset,
        open=ledger.open,
        incidents=ledger.counted,
        readings=Readings(*worst.readings) if worst is not None else None,
        evidence=() if worst is None else worst.evidence,
        batches=() if worst is None else worst.batches,
        skips=sum(each.skips for each in ledger.episodes),
        tried=tuple(tried),
        lr_scale=judge.lr_scale,
        verdict=verdict,
        damaged=tuple(checkpoints.damaged),
        damaged_in_memory=tuple(checkpoints.damaged_in_memory),
        not_finite=tuple(checkpoints.not_finite),
        unsaved=checkpoints.failed,
        unsaved_why=checkpoints.trouble,
        observes=judge.policy.observes,
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

"""What a run's state says about its end: the case that a diagnosis is made from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from healcore.core.verdict import Cause
from healcore.runtime.incidents.incident import Readings
from healcore.runtime.postmortem.diagnosis import Case
from healcore.runtime.store import StoreError

if TYPE_CHECKING:
    from healcore.runtime.run.running import Run


def case_of(run: Run, ending: str, why: str = "", exception: str | None = None) -> Case:
    """The case.

    Args:
        run: at its end.
        ending: `completed`, `stopped`, `exception`, `signal` or `interrupted`.
        why: what ended it, in a few words.
        exception: what was raised, as text.
    """
    ledger, judge = run.ledger, run.judge
    last = ledger.episodes[-1] if ledger.episodes else None
    worst = judge.worst
    return Case(
        ending=ending,
        step=run.step,
        why=why,
        cause=Cause(0 if last is None else last.cause),
        onset=None if last is None else last.onset,
        open=ledger.open,
        incidents=ledger.counted,
        readings=Readings(*worst.readings) if worst is not None else None,
        evidence=() if worst is None else worst.evidence,
        batches=() if worst is None else worst.batches,
        skips=sum(each.skips for each in ledger.episodes),
        tried=tuple(run.tried),
        lr_scale=judge.lr_scale,
        verdict=run.verdict,
        damaged=tuple(run.keeper.damaged),
        unsaved=run.keeper.failed,
        unsaved_why=run.keeper.trouble,
        observes=run.terms.observes,
        last_good=run.keeper.good,
        path=_path(run),
        exception=exception,
    )


def _path(run: Run) -> str | None:
    try:
        saves = run.keeper.store.steps()
    except StoreError:
        return None
    return next((each.path for each in saves if each.step == run.keeper.good), None)

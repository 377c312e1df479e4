"""The first moments of a run: on from a checkpoint, or from a first snapshot."""

from __future__ import annotations

from typing import Any

from healcore.runtime.events import reading
from healcore.runtime.recovery.journal import Plan
from healcore.runtime.run.running import Run
from healcore.runtime.store import NoGoodCheckpoint, Saved


def begin(run: Run, *, resume: bool, died: Any | None) -> None:
    """Goes on from the newest checkpoint, or takes the first snapshot.

    Args:
        run: put together, and nothing else.
        resume: there are checkpoints to go on from.
        died: the postmortem of the process before, if it was killed.

    Raises:
        NoGoodCheckpoint: there are checkpoints, and none can be used.
        StateMismatch: they are of another state.
    """
    run.narrator.begin()
    page = run.journal.page
    run.keeper.accept(page.meant or [])
    if died is not None:
        run.narrator.warn("the run before this one was killed; its postmortem was written")
    if page.begun is not None:
        _finish_rollback(run, page.begun)
    elif resume:
        _resume(run)
    trial = None if page.branch is None else page.branch.plan.trial
    if trial and run.step <= trial[1]:
        run.trials.begin(*trial)
    run.note_rates()
    page.ended = None
    run.recovery.write_journal(run.step)
    run.begins_at(run.step, resumed=resume)
    run.keeper.take_stock()
    if not resume:
        _accept(run)
        run.save("first")
    run.terminating.watch()
    mode = "observed" if run.terms.observes else "healed"
    store = _describe(run.keeper.store)
    run.narrator.say(f"{mode} by policy {run.terms.name}, from step {run.step}; {store}")


def _accept(run: Run) -> None:
    """What is not finite before the first step is meant to be so."""
    meant = run.keeper.accept_first(run.driver.items())
    if meant:
        run.journal.page.meant = meant
        run.recovery.write_journal(run.step)
        run.warn(f"not finite from the start, and taken to be meant so: {', '.join(meant[:5])}")


def _resume(run: Run) -> None:
    saves = run.recovery.saves()
    usable = [s.step for s in saves if s.finite and s.status != "quarantined"]
    if not usable:
        raise NoGoodCheckpoint(
            f"there are checkpoints ({', '.join(str(s.step) for s in saves)}), and all are "
            "quarantined or not finite: pass an empty directory to begin anew"
        )
    step, generators = run.recovery.resume(usable[::-1])
    run.land(step, generators)
    branch = run.journal.page.branch
    if branch is not None and not _told(run, branch.plan.number):
        _tell_late(run, branch.plan, branch.target)
    run.tell("resume", step=step, checkpoint=step)
    over = ", ".join(_passed(saved) for saved in saves if saved.step > step)
    told = f"goes on from the checkpoint of step {step}"
    run.narrator.say(f"{told}; newer ones were passed over: {over}" if over else told)


def _passed(saved: Saved) -> str:
    return f"{saved.step} ({saved.status if saved.finite else 'not finite'})"


def _finish_rollback(run: Run, plan: Plan) -> None:
    """The process before was killed in the middle of one."""
    run.land(*run.recovery.finish(plan))
    _tell_late(run, plan, run.step)
    run.narrator.warn(f"finished a rollback that was cut short: back at step {run.step}")


def _told(run: Run, number: int) -> bool:
    """Whether the events have a rollback's end: the process may have died just before."""
    if run.journal.page.ended is not None or run.log.path is None:
        return True
    try:
        events = reading.read(run.log.path).events
    except OSError:
        return True
    return any(e["kind"] == "rollback" and e.get("number") == number for e in events)


def _tell_late(run: Run, plan: Plan, target: int) -> None:
    run.tell(
        "rollback",
        step=plan.step,
        number=plan.number,
        onset=plan.onset,
        checkpoint=target,
        outcome="finished after a crash" if plan.trial is None else "trial",
    )


def _describe(store: Any) -> str:
    describe = getattr(store, "describe", None)
    return describe() if describe is not None else f"checkpoints in {type(store).__name__}"

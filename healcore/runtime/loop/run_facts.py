"""The facts about a run as it is now: for its diagnosis, and for hooks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from healcore.console import counted
from healcore.core.verdict import Cause
from healcore.events.models import Ending
from healcore.runtime.incidents.hooks import RunFacts
from healcore.runtime.loop.termination import IncompleteRun, RunStopped
from healcore.runtime.postmortem.diagnosis import RunEnd, explain
from healcore.runtime.run_log import RunLog
from healcore.runtime.store import Saved, StoreError

if TYPE_CHECKING:
    from healcore.runtime.loop.loop import Loop

_LOOPS = {
    "jax": "for batch in healer.batches(loader): state = healer.update(step(healer.state, batch))",
    "torch": "for batch in healer.batches(loader): ...; loss.backward(); optimizer.step()",
}
"""The loop to write."""


def run_end(
    loop: Loop,
    ending: Ending,
    why: str = "",
    exception: str | None = None,
    fault: Cause = Cause(0),  # noqa: B008 -- immutable
    hint: str = "",
) -> RunEnd:
    """The facts for a diagnosis; `why` is the reason of a stop, or the signal."""
    checkpoints = loop.checkpoints
    newest_good = [each.path for each in _listed(loop) if each.step == checkpoints.good]
    return RunEnd(
        ending=ending,
        step=loop.step,
        why=why,
        rollbacks=tuple(each for each in loop.ledger.rollbacks if not each.rerun),
        verdict=loop.recovery.verdict,
        damaged=tuple(checkpoints.damaged),
        damaged_in_memory=tuple(checkpoints.damaged_in_memory),
        not_finite=tuple(checkpoints.nonfinite),
        unsaved=checkpoints.failures,
        unsaved_why=checkpoints.last_failure,
        last_good=checkpoints.good,
        last_good_path=next(iter(newest_good), None),
        exception=exception,
        fault=fault,
        hint=hint,
        declined=loop.recovery.declined,
        **loop.monitor.end_facts(),
    )


def stop(log: RunLog, end: RunEnd, error: BaseException | None = None, **fields: Any) -> NoReturn:
    """Ends a run with a diagnosis; `fields` are further ones of the event."""
    text = explain(end)
    log.event(
        "stop", step=end.step, why=end.why, diagnosis=text, checkpoint=end.last_good, **fields
    )
    raise RunStopped(text, end.why, end.last_good) from error


def run_facts(loop: Loop) -> RunFacts:
    """The facts for a hook."""
    return RunFacts(
        run=loop.log.events.run,
        policy=loop.policy.name,
        observes=loop.policy.observes,
        framework=loop.driver.framework,
        rank=loop.ranks.rank,
        learning_rate=loop.driver.learning_rate(),
        rollbacks=loop.journal.state.rollbacks,
        last_good=loop.checkpoints.good,
        checkpoints=tuple(_listed(loop)),
    )


def shortfall(loop: Loop) -> BaseException | None:
    """What a loop that has ended by itself raises because its run is not complete, or None."""
    steps, unread = loop.steps_taken, len(loop.unused)
    write = _LOOPS[loop.driver.framework]
    if steps and not loop.polled:
        return IncompleteRun(
            "healcore: the loop took its steps without the Healer, which could not save between "
            f"them, roll back or stop. Write `{write}`, or call healer.after_step() after each "
            "step. The last state is saved"
        )
    if not steps and (loop.step == 0 or (unread and not loop.left_by_break)):
        read = counted(unread, "batch", "batches")
        return IncompleteRun(
            f"healcore: the loop has ended, and the Healer has seen no step ({read} read). Write "
            f"`{write}`. Nothing was trained: the next start begins at step {loop.step}"
        )
    left_out = loop.steps_left_out
    skipped, total = loop.ledger.untrained, loop.step + left_out
    if not loop.policy.observes and 2 * (skipped + left_out) > total:
        try:
            loop.stop(
                "the data have ended, and the run has not trained on most of them: of "
                f"{total} steps, {skipped} were skipped and {left_out} had their batches left out"
            )
        except RunStopped as stop:
            return stop
    return None


def _listed(loop: Loop) -> list[Saved]:
    try:
        return loop.checkpoints.listed()
    except StoreError:
        return []

"""The facts about a run as it is now: for its diagnosis, and for hooks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from healcore.core.verdict import Cause
from healcore.runtime.events.models import Ending
from healcore.runtime.incidents.hooks import RunFacts
from healcore.runtime.postmortem.diagnosis import RunEnd
from healcore.runtime.store import Saved, StoreError

if TYPE_CHECKING:
    from healcore.runtime.loop.loop import Loop


def run_end(
    loop: Loop,
    ending: Ending,
    why: str = "",
    exception: str | None = None,
    fault: Cause = Cause(0),  # noqa: B008 -- immutable
) -> RunEnd:
    """The facts for a diagnosis; `why` is the reason of a stop, or the signal."""
    checkpoints = loop.checkpoints
    newest_good = [each.path for each in _listed(loop) if each.step == checkpoints.good]
    return loop.monitor.run_end(
        ending,
        loop.step,
        why=why,
        rollbacks=tuple(loop.executor.completed),
        verdict=loop.reruns.verdict,
        damaged=tuple(checkpoints.damaged),
        damaged_in_memory=tuple(checkpoints.damaged_in_memory),
        not_finite=tuple(checkpoints.nonfinite),
        unsaved=checkpoints.failures,
        unsaved_why=checkpoints.last_failure,
        last_good=checkpoints.good,
        path=next(iter(newest_good), None),
        exception=exception,
        fault=fault,
    )


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


def _listed(loop: Loop) -> list[Saved]:
    try:
        return loop.checkpoints.listed()
    except StoreError:
        return []

"""The events and lines of a run's start: what begins where, and under which policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from healcore.console import error_text
from healcore.runtime.driver import STEPPED, WEIGHTS
from healcore.runtime.run import run_settings

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run


def log_start(run: Run, settings: Mapping[str, Any], *, resumes: bool) -> None:
    """Writes the event `start`: the policy, the settings, and where checkpoints go."""
    store = run.store
    run.log.event(
        "start",
        step=None,
        policy=run.policy.name,
        fingerprint=run.policy.engine.fingerprint,
        policy_toml=run.policy.text,
        mode=run.policy.engine.mode,
        framework=run.driver.framework,
        rank=run.ranks.rank,
        world=run.ranks.world,
        save_every=run.schedule.every,
        store=str(store.root or type(store).__name__),
        settings=run_settings.settings_for_events(settings, _first_rate(run)),
        resumes=resumes,
    )


def _first_rate(run: Run) -> float | None:
    """The learning rate of the first optimizer, or None if it is unknown."""
    return next(iter(run.driver.learning_rates().values()))


def log_failed_start(run: Run, error: BaseException) -> None:
    """Logs that the run did not start, and stops watching signals.

    With an end event, the next start does not take this process for killed.
    """
    step = run.progress.step
    run.log.event("problem", step=step, problem=f"the run did not start: {error_text(error)}")
    run.log.event("end", step=step, ending="exception")
    run.end_requests.stop_watching()


def warn_of_snapshot(run: Run, settings: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Warns a loop that counts steps itself, if a checkpoint replaces the program's snapshot."""
    if STEPPED in settings[WEIGHTS] and STEPPED not in saved.get(WEIGHTS, STEPPED):
        obstacle = (
            "the optimizer that the program has passed was trained already, and checkpoint "
            f"{run.progress.step} replaces its state and the weights. A loop that counts its own "
            "steps would lose or repeat steps: write healer.steps or healer.epochs"
        )
        run.loop.state.reject_own_count(obstacle)
        run.loop.warn(obstacle)


def log_first_lines(
    run: Run, settings: Mapping[str, Any], changes: Mapping[str, str], *, resumed: bool
) -> None:
    """Logs what begins where, under which policy, and which settings have changed."""
    store, step = run.store, run.progress.step
    where = "in host memory only"
    if store.durable:
        where = f"in {store.place or type(store).__name__}"
    elif store.trainer_save:
        where = "by the trainer only"
    if run.loop.state.is_complete:
        run.log.info(
            f"this run has completed at step {step}: its final state is loaded, and the loop "
            f"trains nothing (pass resume=True to train on); checkpoints {where}"
        )
        return
    begins = f"resumes from the checkpoint of step {step}" if resumed else f"starts at step {step}"
    if run.progress.had_completed:
        begins = f"loads the final state of step {step} of a run that has completed"
    facts = f"policy {run.policy.name}"
    if run.policy.observes:
        facts += " (observes, changes nothing)"
    rate = _first_rate(run)
    if rate is not None:
        facts += f", learning rate {rate:.4g}"
    run.log.info(f"{begins}: {facts}; checkpoints {where}")
    text = run_settings.changes_text(changes)
    if text:
        run.loop.warn(
            f"other settings than at the start of this run (saved -> given): {text}; "
            "numbers in the state stay as saved (docs/data-and-resume.md)"
        )

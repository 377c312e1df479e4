"""The events and lines of a run's start: what begins where, and under which policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from healcore.console import error_text
from healcore.history import RunHistory, RunState
from healcore.runtime.program_settings import STEPPED, WEIGHTS
from healcore.runtime.reporting.run_log import RunLog
from healcore.runtime.run import run_settings

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run


def log_start(run: Run, settings: Mapping[str, Any], *, resumes: bool) -> None:
    """Writes the event `start`: the policy, the settings, and where checkpoints go."""
    store = run.store
    rate = next(iter(run.driver.learning_rates().values()))
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
        settings=run_settings.settings_for_events(settings, rate),
        resumes=resumes,
    )


def log_previous_end(log: RunLog, history: RunHistory | None, *, kill_text: str) -> None:
    """Says how the previous start has ended, if it was killed or has raised.

    Args:
        log: the log.
        history: the history of the run that is resumed, or None if a new run begins.
        kill_text: a line about the kill of the previous process, or an empty string.
    """
    if kill_text:
        log.warning(kill_text)
    elif history is not None and history.state is RunState.EXCEPTION:
        faults = history.of("fault")
        if faults and faults[-1].problem:
            problem = faults[-1].problem.partition("\n")[0]
            log.warning(f"the previous start ended at step {faults[-1].step}: {problem:.200}")


def warn_of_unused_loss_fn(run: Run) -> None:
    """Warns a program with a `loss_fn` whose policy compares no weights."""
    policy = run.policy
    if not (policy.rolls_back or policy.observes):
        how = 'compares no weights with loss_fn; "default" does, with any clip={...}'
        run.log.warning(f"policy {policy.name} never rolls back, so it {how}")


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
    policy, store, step = run.policy, run.store, run.progress.step
    if store.durable:
        where = f"in {store.place or type(store).__name__}"
    elif store.trainer_save:
        where = "by the trainer only"
    else:
        where = "in host memory only"
    if run.loop.state.is_complete:
        run.log.info(
            f"this run has completed at step {step}: its final state is loaded, the loop trains "
            f"nothing, and the program goes on after it; checkpoints {where}. To train further, "
            "raise the number of epochs or steps and pass resume=True; an empty directory begins a "
            "new run"
        )
        return
    begins = f"resumes from the checkpoint of step {step}" if resumed else f"starts at step {step}"
    if run.progress.had_completed:
        begins = f"loads the final state of step {step} of a run that has completed"
    facts = [f"policy {policy.name}"]
    if policy.observes:
        facts[0] += " (observes, changes nothing)"
    rate = next(iter(run.driver.learning_rates().values()))  # only the first optimizer is named
    if rate is None:
        facts.append("learning rate not known yet")
    elif rate == 0:  # a warm-up from 0 otherwise looks like a mistake
        facts.append(f"learning rate 0 at step {step}")
    else:
        facts.append(f"learning rate {rate:.4g}")
    size = run_settings.settings_for_events(settings, rate).get("batch_size")
    if size is not None:
        facts.append(f"batch size {size}")
    run.log.info(f"{begins}: {', '.join(facts)}; checkpoints {where}")
    text = run_settings.changes_text(changes)
    if text:
        about_rate = run_settings.text_about_rate(changes, run.driver.learning_rates())
        run.loop.warn(
            f"other settings than at the start of this run (saved -> given): {text}. "
            f"{about_rate}Numbers in the state, such as the rate of a torch optimizer, stay as "
            "saved. What the program computes, such as a schedule of optax, is as given. To train "
            "with new settings from the start, pass an empty directory"
        )

"""What the loop watches of the program: steps that are not taken, and changes of its model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from healcore.console import first_of, passes_power_of_ten
from healcore.runtime.data.sources import Sources
from healcore.runtime.driver import Driver
from healcore.runtime.program_settings import WEIGHTS
from healcore.runtime.reporting.run_log import RunLog
from healcore.runtime.run.ending.exits import IncompleteRun

if TYPE_CHECKING:
    from healcore.runtime.run.checkpoints.schedule import SaveSchedule
    from healcore.runtime.run.progress import RunProgress
    from healcore.runtime.run.run import Run
    from healcore.runtime.run.run_record import RunRecord
    from healcore.runtime.run.witness.witness import Witness

MAX_UNSEEN_STEPS = 20
"""Steps without a call of the Healer after which a line says what follows from that."""
MAX_WITHOUT_STEP = 100
"""Batches without a step after which a run may end. Fewer may be a gradient accumulation."""
MAX_ITERATIONS = 1000
"""Iterations of a loop without a step after which a run that trains ends with an error. No gradient
accumulation is as long."""


def warn_of_unseen_steps(run: Run, waiting: int) -> None:
    """Warns a loop that reads batches and takes no step of an optimizer in the state.

    Such a program may train an optimizer that is not in the state. Then its weights change before
    the first step, or it reads more batches than any gradient accumulation. Or its steps have no
    gradients.

    Args:
        run: the parts of the run.
        waiting: number of batches since the last step: `MAX_WITHOUT_STEP` or `MAX_ITERATIONS`.
    """
    reason = run.driver.no_step_reason()
    if reason:
        run.loop.warn(reason)
        return
    step, loader = run.progress.step, run.step_batches.last_read
    weights_change = False
    if waiting == MAX_WITHOUT_STEP and not step:
        weights_change = run.driver.settings()[WEIGHTS] != run.record.settings.get(WEIGHTS)
    trains = loader is not None and (loader.trains or not step)
    if trains and (weights_change or waiting == MAX_ITERATIONS):
        obstacle = "the state needs the optimizer whose step() the loop calls"
        run.loop.warn(f"{waiting} batches without a step that the Healer sees: {obstacle}")


class WarmUp:
    """Counts the iterations of one loop over `Healer.steps` that took no optimizer step.

    Such an iteration gets the same number again. A loop may need many of them before its first
    step, for example to fill a replay buffer. But a program whose steps the Healer does not see
    would get the same number forever, and would never end. So the count has a limit:

        before the first step of the loop    `warmup` of the caller, by default the steps of the
                                             loop and at least `MAX_ITERATIONS`
        after the first step or a rollback   `MAX_ITERATIONS`

    Args:
        total: number of optimizer steps at which the loop ends.
        warmup: iterations that the caller allows before the first step, or None for the default.
        progress: the number of steps shows whether an iteration took one.
        driver: knows whether the weights change in a long wait for a step.
        log: the log, for a wait that is long and allowed.
    """

    def __init__(
        self,
        total: int,
        warmup: int | None,
        *,
        progress: RunProgress,
        driver: Driver,
        log: RunLog,
    ) -> None:
        self._progress = progress
        self._driver = driver
        self._log = log
        self._allowed = max(MAX_ITERATIONS, total)
        if warmup is not None:
            self._allowed = warmup
        self._iterations = 0
        """Number of iterations in a row without a step."""
        self._step: int | None = None
        """Steps done at the last call of `count`, or None before the first call."""
        self._first_step: int | None = None
        """Steps done at the first call of `count`, or None before."""
        self._weights = ""
        """Digest of the weights in the middle of a long wait for a step."""

    def count(self, *, rolled_back: bool) -> None:
        """Counts an iteration, unless it took a step.

        Args:
            rolled_back: whether the run was rolled back since the last call. The number of the step
                may be the same then, although the program has stepped.

        Raises:
            IncompleteRun: the loop took no step in as many iterations as are allowed, or the
                weights change without a step that the Healer sees.
        """
        step = self._progress.step
        if step == self._step and not rolled_back:
            self._iterations += 1
        else:
            self._iterations = 0
        self._step = step
        if self._first_step is None:
            self._first_step = step
        if step != self._first_step or rolled_back:
            self._allowed = MAX_ITERATIONS
        if self._iterations:  # most iterations take a step
            self._check()

    def _check(self) -> None:
        """Raises IncompleteRun after too many iterations, and announces this end in the log."""
        iterations = self._iterations
        is_long = iterations in (MAX_ITERATIONS // 2, MAX_ITERATIONS)
        if is_long and self._driver.state_is_in_place:
            before = self._weights
            self._weights = self._driver.settings()[WEIGHTS]
            if iterations == MAX_ITERATIONS and before != self._weights:
                raise IncompleteRun(
                    f"healcore: the weights change, and the Healer has seen no step in "
                    f"{iterations} iterations of healer.steps: the state needs the optimizer whose "
                    "step() the loop calls"
                )
        if iterations > self._allowed:
            raise IncompleteRun(
                f"healcore: step {self._step} was not taken in {self._allowed} iterations of "
                "healer.steps: for a longer warm-up write healer.steps(n, warmup=iterations), and "
                "a loop with fewer steps calls healer.after_step()"
            )
        if iterations == MAX_ITERATIONS + 1:
            self._log.info(
                f"step {self._step}: {MAX_ITERATIONS} iterations without an optimizer step, as in "
                f"a warm-up; after {self._allowed} of them the run ends with an error"
            )


class StructureChanges:
    """Finds out after each step whether the program has added or removed parameters.

    Earlier checkpoints and earlier weights in memory do not fit such a model. Without a record of
    the change, a rollback would try to restore them, and a restart would reject a model of another
    structure. So a checkpoint follows soon, and comparisons begin again.

    Args:
        driver: finds the changes.
        log: the log, for the changes.
        record: keeps the changes for later processes.
        progress: the number of steps.
        loaders: know the epoch of a change.
        schedule: saves soon after a change.
        witness: begins again after a change.
    """

    def __init__(
        self,
        *,
        driver: Driver,
        log: RunLog,
        record: RunRecord,
        progress: RunProgress,
        loaders: Sources,
        schedule: SaveSchedule,
        witness: Witness,
    ) -> None:
        self._driver = driver
        self._log = log
        self._record = record
        self._progress = progress
        self._loaders = loaders
        self._schedule = schedule
        self._witness = witness
        self._count = 0
        """Number of changes in this process."""

    def note(self) -> None:
        """Records a change of the structure since the last call, and makes a checkpoint due.

        Called after each step. Without the checkpoint, a rollback would have nothing that fits the
        changed model. A program may change its structure often, as in progressive growing, so lines
        in the log become rarer with the number of changes.
        """
        changes = self._driver.structure_changes()
        if not changes:
            return
        step = self._progress.step
        epoch = self._loaders.place.epoch
        self._record.add_change(max(step - 1, 0), epoch)
        self._loaders.epoch_loop.changed_in = epoch
        self._witness.on_structure_change()
        self._schedule.after_change = True
        self._log.event("data", step=step, outcome=f"the model has changed: {first_of(changes)}")
        self._count += 1
        if passes_power_of_ten(self._count - 1, self._count):
            again = ""
            if self._count > 1:
                again = f" ({self._count} times so far)"
            self._log.info(
                f"step {step}: the program has changed the structure of its model{again}: "
                f"{first_of(changes)}. A checkpoint follows, because earlier ones do not fit it"
            )

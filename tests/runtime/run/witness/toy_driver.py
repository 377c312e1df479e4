"""A model of one number and its driver; `loss(weight, batch)` is known, comparisons are free."""

import math
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from healcore.core.decision import Cause
from healcore.events import Log
from healcore.runtime.driver import NumberRange, WeightsChanged
from healcore.runtime.reporting.run_log import RunLog
from healcore.runtime.run.dispatch_queue import StepResult
from healcore.runtime.run.incidents.metrics import RunMetrics
from healcore.runtime.run.rollback.holding import Holding
from healcore.runtime.run.trouble import Trouble
from healcore.runtime.run.witness.evidence import ObservedBatch
from healcore.runtime.run.witness.witness import FORWARD_PASS, Witness
from tests.healer.step_records import record
from tests.runtime.run.bare_driver import BareDriver
from tests.runtime.run.bare_run import bare_run, schedule_of

Loss = Callable[[float, Any], float]
OTHER_PARAMETERS = "other parameters"
"""Weights of an anchor from before the program has changed its parameters."""


class ToyDriver(BareDriver):
    def __init__(self) -> None:
        self.weight: float = 10.0
        self.evaluations = -3
        """Without the calls that check the function at the start."""
        self.rate: float | None = None
        self.accumulates = False
        self.set: dict[str, NumberRange] = {}
        """The numbers that the program has set, and the range of their values so far."""
        self.held: dict[str, NumberRange] = {}

    def learning_rates(self, engines: Any = None) -> dict[str, float | None]:
        return {"optimizer": self.rate}

    def numbers(self) -> dict[str, NumberRange]:
        return self.set

    def hold_numbers(self, ranges: Mapping[str, NumberRange]) -> None:
        self.held = dict(ranges)

    def load(self, state: Any, engines: Any = ()) -> None:
        assert state is None

    def may_save(self, patience: int | None = None) -> bool:
        return not self.accumulates

    def copy_weights(self) -> float:
        return self.weight

    def losses_of(
        self, loss_fn: Loss, batches: Iterable[Any], weights: Any = None, **_: Any
    ) -> list[float]:
        if weights == OTHER_PARAMETERS:
            raise WeightsChanged
        weights = self.weight if weights is None else weights
        found = [loss_fn(weights, batch) for batch in batches]
        self.evaluations += len(found)
        return found


class ToyRun:
    """A run that is compared with its past, without a Healer."""

    def __init__(self, loss_fn: Loss, *, interval: int = 100, **options: Any) -> None:
        self.driver = ToyDriver()
        self.warnings: list[str] = []
        self.assessments: list[str] = []
        log: Any = RunLog(Log(None), silent=True)
        log.event = lambda kind, **fields: self.assessments.append(fields["verdict"])
        self.loss_fn, self.interval = loss_fn, interval
        log.problem = lambda step, problem: self.warnings.append(problem)
        run = bare_run(log, self.driver)
        self.record = run.record
        run.schedule = schedule_of(run, interval)
        run.metrics = RunMetrics(run)
        run.holding = Holding(run)
        run.witness = Witness(run, loss_fn, options.pop("loss_fn_cost", FORWARD_PASS))
        self.witness, self.holding = run.witness, run.holding
        self.step = 0
        self.restorable: Any = range(10**9)
        self.witness.add_anchor(0, self.restorable)

    def take(
        self, batch: Any, *, weight: Any = None, loss: Any = None, norm: Any = math.nan, alarm=False
    ) -> Trouble | None:
        """One step on a batch; `weight` is the weight before its update."""
        if weight is not None:
            self.driver.weight = weight
        if loss is None:
            loss = self.loss_fn(self.driver.weight, batch)
        verdict = self.witness.observe(step_of(self.step, batch, loss, norm=norm, alarm=alarm))
        self.step += 1
        if self.step % self.interval == 0:
            self.witness.add_anchor(self.step, self.restorable)
        return verdict


_RECORD = record()


def step_of(
    index: int, batch: Any, loss: float, *, norm: float = 1.0, alarm: bool = False, **fields: Any
) -> StepResult:
    """A step as the host reads it; without contents for the batch None."""
    cause = Cause.NONFINITE_LOSS if math.isnan(loss) else Cause(0)
    if alarm:
        cause |= Cause.LOSS_SPIKE
    fields = {"cause": cause, "loss": loss, "grad_norm": norm, "engine": "optimizer"} | fields
    contents = () if batch is None else (ObservedBatch(batch),)
    return StepResult(index, [_RECORD._replace(**fields)], (), contents)


def noisy(weight: float, batch: int) -> float:
    """A loss around the weight's own level; batches differ by up to 0.1."""
    return weight + 0.1 * random.Random(batch).random()


LASTS = 50
"""Steps from the anchor of step 200 to damage at step 250, which a rollback repeats."""


def healthy_weight(step: int) -> float:
    """The weight of a healthy run at a step: it falls from 10 on, always more slowly."""
    return 10.0 / (1 + step / 50)


def train_healthy(run: ToyRun, steps: int, *, alarm: bool = False) -> None:
    """Healthy steps, in which no verdict may come, also if a detector raises alarms."""
    for _ in range(steps):
        assert run.take(run.step, weight=healthy_weight(run.step), alarm=alarm) is None


def healthy_run(steps: int, loss: Loss = noisy) -> ToyRun:
    """A run that has had healthy steps."""
    run = ToyRun(loss)
    train_healthy(run, steps)
    return run


def train_damaged(run: ToyRun, steps: int = 250, by: float = 5.0, *, alarm: bool = True) -> Any:
    """Steps with a weight that is higher by `by`, up to the verdict. Returns it, or None."""
    level = run.driver.weight + by
    for _ in range(steps):
        verdict = run.take(run.step, weight=level, alarm=alarm)
        if verdict is not None:
            return verdict
    return None

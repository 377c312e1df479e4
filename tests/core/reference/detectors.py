"""The reference's detectors, from their docstrings.

Each has `see(step: Step) -> tuple[bool, bool, cause]`: alarm, sustained, flags.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from healcore.core.verdict import Cause
from tests.core.reference.limits import (
    GradCeiling,
    GradEma,
    GradWindow,
    LossCeiling,
    LossRatio,
    LossWindow,
)
from tests.core.reference.losses import Divergence, LossSpike, Outliers
from tests.core.reference.records import Instability, Records
from tests.core.reference.ties import Ties

Finding = tuple[bool, bool, int]


class Step(NamedTuple):
    """One step as the detectors see it: finite numbers, None for what is absent."""

    loss: float | None
    norm: float | None
    update: float | None
    evaluation: float | None
    """None at a step without an evaluation."""
    bad_loss: bool
    bad_grad: bool
    bad_update: bool
    finite: bool
    restart: bool
    rate: float | None
    """The schedule's learning rate; None: not known."""


class Nonfinite:
    """Reports what is not finite, at once."""

    def __init__(self, config: Any, ties: Ties) -> None:
        del config, ties

    def see(self, step: Step) -> Finding:
        bad_grad = step.bad_grad or step.bad_update  # the update is made of gradients
        flags = Cause.NONFINITE_LOSS * step.bad_loss | Cause.NONFINITE_GRAD * bad_grad
        return flags != 0, flags != 0, int(flags)


class NormSpike:
    """Outliers of the gradient norm, by the same rule as those of the loss."""

    cause = Cause.GRAD_SPIKE

    def __init__(self, config: Any, ties: Ties) -> None:
        self.outliers = Outliers(config, ties)

    def value(self, step: Step) -> float:
        assert step.norm is not None
        return step.norm

    def see(self, step: Step) -> Finding:
        x = self.value(step)
        alarm, sustained = self.outliers.see(x, step.finite and x > 0, step.restart)
        return alarm, sustained, int(self.cause) if alarm or sustained else 0


class UpdateSpike(NormSpike):
    """The same on the update's norm."""

    cause = Cause.UPDATE_SPIKE

    def value(self, step: Step) -> float:
        assert step.update is not None
        return step.update


class Vanishing:
    """A row of norms below a floor."""

    def __init__(self, config: Any, ties: Ties) -> None:
        self.config, self.ties, self.run = config, ties, 0

    def see(self, step: Step) -> Finding:
        assert step.norm is not None
        if step.restart:
            self.run = 0
        if not step.finite:
            return False, False, 0
        gone = not self.ties.above(step.norm, self.config.threshold)
        self.run = self.run + 1 if gone else 0
        if step.restart:
            self.run = 0
        alarm = self.run >= self.config.patience
        return alarm, alarm, int(Cause.GRAD_VANISHING) if alarm else 0


class Plateau:
    """Lists of losses, one per window."""

    def __init__(self, config: Any, ties: Ties) -> None:
        self.config, self.ties = config, ties
        self.losses: list[float] = []
        self.best: float | None = None
        self.best_of = 0.0  # the largest loss of its window, by which its mean is rounded
        self.doubt = math.inf  # the closest comparison that the count of stale windows rests on
        self.stale, self.at_chance = 0, False
        self.last, self.change = 0.0, 0.0

    def see(self, step: Step) -> Finding:
        c, x = self.config, step.loss
        assert x is not None
        alarm = False
        if step.finite:
            if self.losses or self.best is not None:
                moved = abs(x - self.last)
                self.change += (moved - self.change) * (0.01 if self.change else 1.0)
            self.last = x
            self.losses.append(x)
            if len(self.losses) >= c.window:
                self._close()
            alarm = self.stale >= c.patience or self.at_chance
            self.ties.recall(self.doubt)
        if step.restart:
            self.losses, self.best, self.stale, self.at_chance = [], None, 0, False
            alarm = False
        return alarm, alarm, int(Cause.PLATEAU) if alarm else 0

    def _close(self) -> None:
        c = self.config
        mean = sum(self.losses) / len(self.losses)
        sizes = [abs(x) for x in self.losses]
        self.losses = []
        gain = None if self.best is None else self.best - mean
        here = Ties()
        if gain is None or here.above(
            gain, c.min_improvement * self.change, mean, self.best_of, max(sizes)
        ):
            self.best, self.best_of, self.stale = mean, max(sizes), 0
            self.doubt = here.closest if here.close else math.inf
        else:
            self.stale += 1
            self.doubt = min(self.doubt, here.closest)
        self.ties.recall(here.closest)
        if c.chance_level is not None:
            far = self.ties.above(abs(mean - c.chance_level), c.chance_margin, *sizes)
            self.at_chance = not far


class Overfit:
    """A row of evaluations far above the smoothed training loss."""

    def __init__(self, config: Any, ties: Ties) -> None:
        self.config, self.ties = config, ties
        self.train: float | None = None
        self.run = 0

    def see(self, step: Step) -> Finding:
        c, x = self.config, step.loss
        assert x is not None
        if step.finite:
            old = self.train
            self.train = x if old is None else old + (1 - c.ema_decay) * (x - old)
        if step.evaluation is not None and self.train is not None:
            gap = step.evaluation - self.train
            wide = self.ties.above(gap, c.max_gap, step.evaluation, self.train)
            self.run = self.run + 1 if wide else 0
        if step.restart:
            self.run = 0
        alarm = self.run >= c.patience
        return alarm, alarm, int(Cause.OVERFIT) if alarm else 0


DETECTORS: dict[str, tuple[Any, frozenset[str]]] = {
    "nonfinite": (Nonfinite, frozenset()),
    "loss_spike": (LossSpike, frozenset({"loss"})),
    "divergence": (Divergence, frozenset({"loss"})),
    "instability": (Instability, frozenset({"loss", "norm"})),
    "records": (Records, frozenset({"loss"})),
    "grad_spike": (NormSpike, frozenset({"norm"})),
    "vanishing": (Vanishing, frozenset({"norm"})),
    "plateau": (Plateau, frozenset({"loss"})),
    "overfit": (Overfit, frozenset({"loss", "eval_loss"})),
    "update_spike": (UpdateSpike, frozenset({"update"})),
    "loss_ratio": (LossRatio, frozenset({"loss"})),
    "loss_ceiling": (LossCeiling, frozenset({"loss"})),
    "loss_window": (LossWindow, frozenset({"loss"})),
    "grad_window": (GradWindow, frozenset({"norm"})),
    "grad_ema": (GradEma, frozenset({"norm"})),
    "grad_ceiling": (GradCeiling, frozenset({"norm"})),
}
"""Class, and the signals without which it rests."""

"""The reference's detectors, from their docstrings."""

import math
from typing import Any, NamedTuple

from healcore.core.decision import Cause
from tests.core.reference.limits import (
    GradCeiling,
    GradEma,
    GradWindow,
    LossCeiling,
    LossRatio,
    LossWindow,
)
from tests.core.reference.loss_records import Instability, Records
from tests.core.reference.losses import Divergence, LossSpike, NormSpike
from tests.core.reference.ties import Detector, Finding, Ties


class Step(NamedTuple):
    """One step as the detectors see it: finite numbers, None for what is absent."""

    loss: float | None
    norm: float | None
    evaluation: float | None
    """None at a step without an evaluation."""
    bad_loss: bool
    bad_grad: bool
    finite: bool
    restart: bool
    rate: float | None
    """The schedule's learning rate; None: not known."""


class Nonfinite(Detector):
    """Reports what is not finite, at once."""

    def see(self, step: Step) -> Finding:
        flags = Cause.NONFINITE_LOSS * step.bad_loss | Cause.NONFINITE_GRAD * step.bad_grad
        return flags != 0, flags != 0, int(flags)


class Vanishing(Detector):
    """A row of norms below a floor; a step at which a change is expected does not count."""

    cause = Cause.GRAD_VANISHING

    def see(self, step: Step) -> Finding:
        assert step.norm is not None
        if step.restart:
            self.row = 0
        if not step.finite:
            return self.found(False)
        gone = not self.ties.above(step.norm, self.config.threshold)
        self.row = self.row + 1 if gone and not step.restart else 0
        return self.found(self.row >= self.config.patience)


class Plateau(Detector):
    """Lists of losses, one per window."""

    cause = Cause.PLATEAU

    def begin(self) -> None:
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
            self.losses = []
            self.best = None
            self.stale = 0
            self.at_chance = False
            alarm = False
        return self.found(alarm)

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
            self.best = mean
            self.best_of = max(sizes)
            self.stale = 0
            self.doubt = here.closest if here.close else math.inf
        else:
            self.stale += 1
            self.doubt = min(self.doubt, here.closest)
        self.ties.recall(here.closest)
        if c.chance_level is not None:
            far = self.ties.above(abs(mean - c.chance_level), c.chance_margin, *sizes)
            self.at_chance = not far


class Overfit(Detector):
    """A row of evaluations far above the smoothed training loss."""

    cause = Cause.OVERFIT

    def begin(self) -> None:
        self.train: float | None = None
        self.row = 0

    def see_dropped(self, step: Step) -> None:
        """A step that the caller skips: its evaluation counts, its loss is not learnt."""
        train = self.train
        self.see(step)
        self.train = train

    def see(self, step: Step) -> Finding:
        c, x = self.config, step.loss
        assert x is not None
        if step.finite:
            old = self.train
            self.train = x if old is None else old + (1 - c.ema_decay) * (x - old)
        if step.evaluation is not None and self.train is not None:
            gap = step.evaluation - self.train
            wide = self.ties.above(gap, c.max_gap, step.evaluation, self.train)
            self.row = self.row + 1 if wide else 0
        if step.restart:
            self.row = 0
        return self.found(self.row >= c.patience)


DETECTORS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "nonfinite": (Nonfinite, ()),
    "loss_spike": (LossSpike, ("loss",)),
    "divergence": (Divergence, ("loss",)),
    "instability": (Instability, ("loss", "grad_norm")),
    "records": (Records, ("loss",)),
    "grad_spike": (NormSpike, ("grad_norm",)),
    "vanishing": (Vanishing, ("grad_norm",)),
    "plateau": (Plateau, ("loss",)),
    "overfit": (Overfit, ("loss", "eval_loss")),
    "loss_ratio": (LossRatio, ("loss",)),
    "loss_ceiling": (LossCeiling, ("loss",)),
    "loss_window": (LossWindow, ("loss",)),
    "grad_window": (GradWindow, ("grad_norm",)),
    "grad_ema": (GradEma, ("grad_norm",)),
    "grad_ceiling": (GradCeiling, ("grad_norm",)),
}
"""Class, and the signals without which it rests."""

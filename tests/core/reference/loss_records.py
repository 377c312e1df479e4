"""The reference's records and instability, from the whole history of the losses."""

from typing import Any

from healcore.core.decision import Cause
from tests.core.reference.ties import Detector, Finding, Ties


class LossRecords:
    """Losses, and those among them that exceed all before them by a margin."""

    def __init__(self, growth: float, ties: Ties) -> None:
        self.growth, self.ties = growth, ties
        self.losses: list[float] = []
        """None of them infinite."""
        self.records: list[float] = []
        """The first loss, and those that counted."""

    def add(self, loss: float) -> bool:
        """Whether this loss is a record."""
        earlier = self.losses
        self.losses = [*self.losses, loss]
        if not earlier:
            self.records = [loss]
            return False
        if loss <= max(earlier):
            return False
        lowest = min(earlier)
        last = self.records[-1]
        bar = last + self.growth * (last - lowest)
        if not self.ties.above(loss, bar, last, lowest):
            return False
        self.records.append(loss)
        return True


class WithHistory(Detector):
    """A comparison too close to call, here in `ties`, bears on all that comes after it."""

    def __init__(self, config: Any, ties: Ties) -> None:
        self.shared_ties = ties
        super().__init__(config, Ties())

    def found(self, alarm: bool, sustained: bool | None = None) -> Finding:
        if self.ties.close:
            self.shared_ties.recall(self.ties.closest)
        if alarm:
            self.begin()
        return super().found(alarm, sustained)


class Records(WithHistory):
    """Bets on records at even odds against their probability 1/t in an exchangeable stream."""

    cause = Cause.RECORDS

    def begin(self) -> None:
        self.history = LossRecords(self.config.growth, self.ties)
        self.t = 0
        """Losses, and steps without one that counted."""
        self.bets: list[float] = []
        """What each stake, made at one step, has become."""
        self.after_record = False

    def see(self, step: Any) -> Finding:
        if step.restart:
            self.begin()
            self.ties.forget()
        if step.bad_loss and not self.after_record:
            return False, False, 0
        self.t += 1
        if not step.bad_loss:
            self.after_record = self.history.add(step.loss)
        return self.found(self._bet(record=self.after_record))

    def _bet(self, *, record: bool) -> bool:
        c, t = self.config, self.t
        if t <= c.warmup_steps or not self.ties.above(c.record_rate, 1 / t):
            return False
        chance = 1 / t
        won = c.record_rate / chance if record else (1 - c.record_rate) / (1 - chance)
        stake = c.warmup_steps * (1 / t - 1 / (t + 1))
        self.bets = [bet * won for bet in (*self.bets, stake)]
        total = sum(self.bets)
        return total >= 1 / c.alpha or self.ties.above(total, 1 / c.alpha)


class Instability(WithHistory):
    """Records of the loss at which the gradient norm is many times its usual size."""

    cause = Cause.INSTABILITY

    def begin(self) -> None:
        self.history = LossRecords(self.config.growth, self.ties)
        self.usual: list[float] = []
        """The usual norm after each step."""
        self.grown: list[int] = []
        """Steps, as the number of finite ones before, of the growth in progress."""
        self.grew = False
        """Whether the last step was one of them."""

    def see(self, step: Any) -> Finding:
        if step.restart:
            self.begin()
            self.ties.forget()
        at = len(self.usual)
        if step.finite:
            self.grew = self._grows(step)
        if self.grew:
            recent = self.grown and at - self.grown[-1] <= self.config.patience
            self.grown = [*(self.grown if recent else []), at]
        return self.found(self.grew and len(self.grown) >= self.config.records)

    def _grows(self, step: Any) -> bool:
        record = self.history.add(step.loss)
        usual = self.usual[-1] if self.usual else 0.0
        large = self.config.norm_ratio * usual
        above = record and self.ties.above(step.norm, large)
        norm = min(step.norm, large) if usual > 0 else step.norm
        weight = max(1 / 32, 1 / (len(self.usual) + 1))
        self.usual.append((1 - weight) * usual + weight * norm)
        return above

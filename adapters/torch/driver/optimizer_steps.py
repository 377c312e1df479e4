"""`OptimizerSteps`: which optimizers have stepped for the last batch, and which have gradients.

Below it are the functions that read and hold the numbers of all optimizers of a run: the learning
rates, and others such as the weight decay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from healcore import console
from healcore.console import counted
from healcore.runtime.driver import NumberRange
from healcore.torch.attachment import Healing
from healcore.torch.driver.accumulation import Accumulation

STEPS_WITHOUT_DISPATCH = 20
"""Steps before the first call of `TorchDriver.take_dispatch` after which a line says so."""
STEPS_WITHOUT_GRADIENT = 20
"""Steps without a gradient, before the first step with one, after which a line says so."""


class OptimizerSteps:
    """Knows which optimizers have stepped since the Healer last looked.

    One `Accumulation` knows one optimizer. Questions about the whole run need all accumulations,
    because an optimizer may step in every batch, in some batches, or not any more:

        GAN           both optimizers step for each batch, one after the other
        fine-tuning   the optimizer of the first stage does not step any more

    Attributes:
        accumulations: the gradients of each optimizer.
        observed: whether a loss was observed since the last step of any optimizer. The driver sets
            it, and `on_step` resets it.
    """

    def __init__(self, accumulations: Sequence[Accumulation], warnings: list[str]) -> None:
        self.accumulations = accumulations
        self._warnings = warnings
        """Receives lines for the log of the run."""
        self.observed = False
        self._usual = set(accumulations)
        """The accumulations whose optimizers stepped for the last batch; at first all."""
        self._steps_without_dispatch = 0
        """Number of steps before the first `end_batch`."""
        self._has_ended_batch = False
        """Whether `end_batch` was ever called: the program lets the Healer act between batches."""
        self._without_gradient = 0
        """Number of steps of all optimizers, while none of them has had a gradient."""
        self._has_judged = False
        """Whether any step was judged."""

    @property
    def in_progress(self) -> bool:
        """Whether any optimizer has gradients that it has not stepped with."""
        return any(accumulation.in_progress for accumulation in self.accumulations)

    def on_step(self, *, judged: bool) -> None:
        """Notes a step of any optimizer. No loss and no backward pass has followed it yet.

        Args:
            judged: whether a step was judged since the last `end_batch`. A step without gradients
                is not judged.
        """
        self.observed = False
        for accumulation in self.accumulations:
            accumulation.reached_since_any_step = False
        if judged:
            self._has_judged = True
        if not self._has_judged:
            self._without_gradient += 1
            if self._without_gradient == STEPS_WITHOUT_GRADIENT:
                self._warnings.append(self.no_step_reason())
        if self._has_ended_batch:
            return
        self._steps_without_dispatch += 1
        if self._steps_without_dispatch == STEPS_WITHOUT_DISPATCH:
            console.warning(
                f"{STEPS_WITHOUT_DISPATCH} steps, and neither healer.batches(loader) nor "
                "healer.after_step() was called. If none of these calls follows, the Healer cannot "
                "save, roll back or stop: the run cannot be resumed, and it ends with status 1. "
                "Write `for batch in healer.batches(loader)`, or healer.after_step() after each "
                "step"
            )

    def no_step_reason(self) -> str:
        """See `Driver.no_step_reason`."""
        if self._has_judged or not self._without_gradient:
            return ""
        return (
            f"optimizer.step() was called {counted(self._without_gradient, 'time')}, and no "
            "parameter had a gradient, so nothing was trained. Check that zero_grad() is not "
            "called between backward() and step(), that the loss is not detached, and that the "
            "optimizer has the parameters of the model"
        )

    def end_batch(self, *, judged: bool) -> None:
        """Takes note of the optimizers that have stepped since the last call.

        Once each of several optimizers has stepped, their remaining gradients and losses are
        dropped as by-products: a GAN's generator loss also has gradients in the discriminator.

        Args:
            judged: whether any step was judged since the last call.
        """
        self._has_ended_batch = True
        stepped = self._stepped()
        if stepped:
            self._usual = stepped
        for accumulation in self.accumulations:
            if judged and not accumulation.stepped:
                accumulation.idle += 1
            accumulation.stepped = False
        if len(self.accumulations) > 1 and len(stepped) == len(self.accumulations):
            for accumulation in self.accumulations:
                accumulation.drop_by_products()

    @property
    def has_backward(self) -> bool:
        """Whether a backward pass has run since the last step of any optimizer.

        An evaluation reads batches too, and has no backward pass.
        """
        return any(each.reached_since_any_step for each in self.accumulations)

    def may_save(self, patience: int | None) -> bool:
        """See `TorchDriver.may_save`.

        Args:
            patience: number of steps of the other optimizers after which gradients of an optimizer
                that does not step count as abandoned, or None to wait for every optimizer.
        """
        pending: list[Accumulation] = []
        for accumulation in self.accumulations:
            if accumulation.in_progress:
                pending.append(accumulation)
        has_begun = self.observed or self.has_backward
        for accumulation in pending:
            is_abandoned = patience is not None and accumulation.idle >= patience
            if has_begun or not is_abandoned:
                return False
        return True

    def is_incomplete(self) -> bool:
        """Whether only some of the optimizers that stepped for the last batch have stepped since.

        For example the discriminator of a GAN, and not yet its generator.
        """
        stepped = self._stepped()
        return bool(stepped) and stepped < self._usual

    def _stepped(self) -> set[Accumulation]:
        """The optimizers that have stepped since the last `end_batch`."""
        return {accumulation for accumulation in self.accumulations if accumulation.stepped}


def learning_rates(healings: Mapping[str, Healing]) -> dict[str, float | None]:
    """The learning rates that the program has set now, as the engines read them.

    Args:
        healings: the handle of each optimizer, by name.

    Returns:
        Optimizer name -> the largest rate of its groups, or None without one. A rate in a tensor on
        an accelerator is a sync.
    """
    largest: dict[str, float | None] = {}
    for name, healing in healings.items():
        rates: list[float] = []
        for group in healing.optimizer.param_groups:
            if group.get("lr") is not None:
                rates.append(float(group["lr"]))
        largest[name] = max(rates, default=None)
    return largest


def trained_rates(healings: Mapping[str, Healing]) -> dict[str, float | None]:
    """The learning rates with which the optimizers took their last step.

    A scheduler may have changed the rates since. The rate of the last step is known only for an
    optimizer whose numbers are watched. For any other optimizer the current rate is returned.

    Args:
        healings: the handle of each optimizer, by name.

    Returns:
        Name of the optimizer -> learning rate, as in `learning_rates`.
    """
    rates = learning_rates(healings)
    for name, healing in healings.items():
        numbers = healing.healed_step.numbers
        if numbers is not None and numbers.rate is not None:
            rates[name] = numbers.rate
    return rates


def number_ranges(healings: Mapping[str, Healing]) -> dict[str, NumberRange]:
    """The values that the watched numbers have had. No sync: tensors on a device are not read.

    Args:
        healings: the handle of each optimizer, by name.

    Returns:
        Name of the optimizer and place in its groups, as one text -> range.
    """
    ranges: dict[str, NumberRange] = {}
    for name, healing in healings.items():
        numbers = healing.healed_step.numbers
        if numbers is not None:
            for place, number_range in numbers.ranges().items():
                ranges[f"{name}{place}"] = number_range
    return ranges


def hold_numbers(healings: Mapping[str, Healing], ranges: Mapping[str, NumberRange]) -> None:
    """Holds each number in its range from the next step on, and releases all other numbers.

    Args:
        healings: the handle of each optimizer, by name.
        ranges: names as in `number_ranges` -> range.
    """
    for name, healing in healings.items():
        numbers = healing.healed_step.numbers
        if numbers is None:
            continue
        own: dict[str, NumberRange] = {}
        for full_name, number_range in ranges.items():
            if full_name.startswith(name):
                own[full_name.removeprefix(name)] = number_range
        numbers.hold(own)

"""`LossFunction`: evaluates the user's `loss_fn` with current and with earlier weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from healcore.core.signals import SignalError, check_scalar
from healcore.core.verdict import Cause
from healcore.runtime.dominance.anchor import TrainedStep
from healcore.runtime.dominance.side_effects import undone
from healcore.runtime.driver import Driver, WeightsChanged
from healcore.runtime.faults import classify
from healcore.runtime.store.ranks import Ranks

SAME_LOSS = 1e-3
"""Relative difference up to which two losses of one batch are equal, in half precision too."""


class LossFunction:
    """The `loss_fn` of a Healer, evaluated on all ranks.

    A `loss_fn` that raises is not called again: it must not end the run that it protects.

    Attributes:
        function: the `loss_fn`, or None if it cannot be used.
        gives_loss: whether the training loss is the result of `loss_fn`. Comparisons then do not
            evaluate the current weights again. True if the loop calls `Healer.loss`, or if the
            first training loss is equal to `loss_fn` of its batch.
        is_checked: whether `learn_first_step` was called.
        draws: whether `loss_fn` draws random numbers. The training loss had other numbers than a
            comparison has, so both weights are evaluated.
    """

    def __init__(
        self,
        function: Callable[..., Any] | None,
        driver: Driver,
        ranks: Ranks,
        warn: Callable[[str], object],
    ) -> None:
        self.function = function
        self.gives_loss = self.draws = self.is_checked = False
        self._driver = driver
        self._ranks = ranks
        self._warn = warn

    def learn_first_step(self, step: TrainedStep, loss: float, first_weights: Any) -> None:
        """Checks `loss_fn` on the first step, and compares it with the step's training loss.

        Args:
            step: a step with its batches.
            loss: the training loss of a dispatch of one step, else NaN.
            first_weights: copy of the weights before this step, or None.

        Raises:
            SignalError: as for `_check`.
        """
        self.is_checked = True
        known = self._check(step.batches[0].content) and not self.gives_loss
        if not known or first_weights is None or len(step.batches) > 1:
            return
        with suppress(WeightsChanged):
            losses = self.losses([step], first_weights, [math.nan])
            self.gives_loss = bool(losses) and math.isclose(loss, losses[1][0], rel_tol=SAME_LOSS)

    def losses(
        self, steps: Sequence[TrainedStep], weights: Any, known: list[float] | None = None
    ) -> tuple[list[float], list[float]] | None:
        """Evaluates steps with the current weights and with earlier weights.

        Args:
            steps: the steps, with their batches.
            weights: the earlier weights, a result of `Driver.copy_weights`.
            known: losses of the steps with the current weights, or None to evaluate these.

        Returns:
            Two lists with one loss per step, current and earlier weights, each the mean over all
            ranks; or None if the `loss_fn` raises on some rank.

        Raises:
            WeightsChanged: on some rank the parameters have changed since the earlier weights.
        """
        batches = [each.content for step in steps for each in step.batches]
        mine: tuple[list[float], list[float]] | str | None
        failure = None
        try:
            now = known or _mean_losses(self._evaluated(batches, None), steps)
            mine = (now, _mean_losses(self._evaluated(batches, weights), steps))
        except WeightsChanged:
            mine = None
        except Exception as error:
            mine, failure = f"{type(error).__name__}: {error}", error
        everyone = self._gather(mine, failure)
        if None in everyone:
            raise WeightsChanged
        failed = [each for each in everyone if isinstance(each, str)]
        if failed:
            self.function = None
            self._warn(f"loss_fn raised {failed[0]}; it is not called again")
            return None
        now, then = (
            [float(sum(each)) / len(everyone) for each in zip(*part, strict=True)]
            for part in zip(*everyone, strict=True)
        )
        return now, then

    def _gather(self, item: Any, failure: Exception | None) -> list[Any]:
        """The items of all ranks. `failure`: exception of the call on this rank, or None."""
        try:
            return self._ranks.gather(item)
        except Exception as error:  # the other ranks wait in the forward pass (FSDP)
            raise error from failure

    def _evaluated(self, batches: Sequence[Any], weights: Any) -> list[float]:
        assert self.function is not None
        with undone():
            losses = self._driver.losses_of(self.function, batches, weights)
        return [float(check_scalar("loss_fn(batch)", loss)) for loss in losses]

    def _check(self, batch: Any) -> bool:
        """Calls `loss_fn` twice with the same random numbers, and once with others.

        Returns whether it can be used, and has returned numbers on every rank.

        Raises:
            SignalError: `loss_fn` changes the batch, raises, or does not return one number. An
                exception about memory, data or the network is only a warning.
        """
        assert self.function is not None
        losses, mistake, problem, failure, state, draws = [], None, None, None, None, False
        try:
            with undone(self.function):
                for redraw in (False, False, True):
                    with undone():
                        losses += self._driver.losses_of(self.function, [batch], redraw=redraw)
            first, second, third = (float(check_scalar("loss_fn(batch)", each)) for each in losses)
            draws = first != third
            if abs(first - second) > SAME_LOSS * max(abs(first), SAME_LOSS):  # False for NaN
                state = (
                    f"loss_fn gives {first:.6g} and then {second:.6g} for the same batch, because "
                    "it keeps state or draws from a generator of its own: no weights are compared. "
                    "Change such state in the loop, and draw from the global generators"
                )
        except SignalError as error:
            mistake, failure = str(error), error
        except Exception as error:
            failure = error
            problem = f"loss_fn raised {type(error).__name__} on the first batch: {error}"
            if classify(error).cause is Cause.UNKNOWN:
                how = "loss_fn(batch), or in JAX with a pytree as state loss_fn(state, batch)"
                mistake = (
                    f"{problem}\nThe Healer calls {how}, with a batch of healer.batches(), and "
                    "expects one number: correct the function, or pass no loss_fn"
                )
        everyone = self._gather((mistake, problem, state, draws), failure)
        mistakes, problems, states, drawing = (
            [*filter(None, each)] for each in zip(*everyone, strict=True)
        )
        self.draws = bool(drawing)
        if mistakes:
            raise SignalError(mistakes[0]) from failure
        if problems or states:
            self._warn((states or problems)[0])
        if states:
            self.function = None
        return not (problems or states)


def _mean_losses(losses: Sequence[float], steps: Sequence[TrainedStep]) -> list[float]:
    """The mean loss of each step, from the losses of all their batches in order."""
    remaining, means = iter(losses), []
    for step in steps:
        total = sum(each.weight * loss for each, loss in zip(step.batches, remaining, strict=False))
        means.append(total / sum(each.weight for each in step.batches))
    return means

"""`LossFunction`: evaluates the user's `loss_fn` with current and with earlier weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from healcore.core.decision import Cause
from healcore.core.errors import HealcoreError
from healcore.core.signals import SignalError, check_scalar
from healcore.runtime.data.random_states import isolated
from healcore.runtime.driver import LossFn, WeightsChanged
from healcore.runtime.faults.classification import classify
from healcore.runtime.faults.microbatches import clear_frames
from healcore.runtime.run.witness.evidence import ComparisonState, TrainedStep

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run

SAME_LOSS = 1e-3
"""Relative difference up to which two losses of one batch are equal, in half precision too."""


def loss_of(result: Any) -> Any:
    """The loss in what a `loss_fn` has returned.

        loss_of(loss) == loss_of((loss, logits)) == loss_of({"loss": loss, "logits": logits})

    Args:
        result: the loss; or a tuple that begins with it, as the `compute_loss` of trainers returns;
            or a mapping with the key "loss", such as an output of a Hugging Face model.
    """
    if isinstance(result, tuple) and result:
        return result[0]
    if isinstance(result, Mapping) and "loss" in result:
        return result["loss"]
    return result


class NotComparable(HealcoreError, ValueError):
    """Raised by a `loss_fn` that healcore has made from a trainer's step and cannot use.

    For example, the step may change state that a second call cannot undo. The run continues without
    comparisons, and the log says why.
    """


class _Failure(NamedTuple):
    """Why an evaluation has failed on one rank."""

    text: str
    """The problem, for the user."""
    is_mistake: bool
    """Whether the function is wrong, and not only this call of it."""
    parts: int
    """If memory ran out: the parts of the batches, which may be halved. Else 0."""


class LossFunction:
    """The `loss_fn` of a Healer, evaluated on all ranks.

    A `loss_fn` that raises is not called again: it must not end the run that it protects. If memory
    runs out, it is called again for smaller parts of the batches. Both weights are evaluated on the
    same parts, so that their losses can be compared even if a loss of parts differs from the loss
    of the whole batch.

    Args:
        run: the parts of the run.
        function: the user's function of a batch, or None to evaluate nothing.

    Attributes:
        function: returns the loss alone; None once it may not be called.
        is_checked: whether `check` was called.
    """

    def __init__(self, run: Run, function: LossFn | None) -> None:
        self.run = run
        self.function: LossFn | None = None
        if function is not None:
            self.function = lambda *given: loss_of(function(*given))
        self.is_checked = False

    def drop(self, problem: str) -> None:
        """Drops the function for the rest of the process. The run continues without comparisons.

        Args:
            problem: why it cannot be used, for the log.
        """
        self.function = None
        self.run.record.comparisons = ComparisonState()
        self.run.log.problem(self.run.progress.step, problem)

    def check(self, trained: TrainedStep, loss: float) -> None:
        """Calls `loss_fn` twice on the first step with batches. It is dropped if it is unusable.

        Args:
            trained: the step.
            loss: its training loss. If it is the loss of the weights before the step, comparisons
                need not evaluate current weights. A `loss_fn` that draws random numbers has drawn
                others in the step, so its loss is another one.

        Raises:
            SignalError: `loss_fn` changes the batch, raises, or does not return one number. An
                exception about memory, data or the network is only a warning.
        """
        everyone = self._on_all_ranks([trained], None)
        self.is_checked = True
        for [(first, second)] in everyone or ():
            # False for NaN: a loss of NaN is no sign of state.
            if abs(first - second) > SAME_LOSS * max(abs(first), SAME_LOSS):
                self.drop(
                    f"loss_fn gives {first:.6g} and then {second:.6g} for the same batch, "
                    "because it keeps state or draws from a generator of its own: no weights are "
                    "compared. Change such state in the loop, and draw from the global generators"
                )
                return
        state = self.run.record.comparisons
        before = state.anchor_of(trained.index)
        if everyone and before is not None:
            losses = self.losses([trained], before.weights, [math.nan])
            if losses is not None:
                state.gives_loss = math.isclose(loss, losses[0][1], rel_tol=SAME_LOSS)

    def losses(
        self, steps: Sequence[TrainedStep], weights: Any, known: list[float] | None = None
    ) -> list[tuple[float, float]] | None:
        """Evaluates steps with the current weights and with earlier weights. Collective.

        Args:
            steps: the steps, with their batches.
            weights: the earlier weights, a result of `Driver.copy_weights`.
            known: losses of the steps with the current weights, or None to evaluate these.

        Returns:
            For each step the loss with the current and with the earlier weights, each the mean over
            all ranks. None if on some rank the parameters have changed since, or if the `loss_fn`
            raises: then it is dropped.
        """
        if self.function is None:
            everyone = None
        else:
            everyone = self._on_all_ranks(steps, weights, known)
        if everyone is None or None in everyone:
            return None
        # The mean over the ranks.
        return [(float(now), float(then)) for now, then in np.mean(everyone, axis=0)]

    def _on_all_ranks(
        self, steps: Sequence[TrainedStep], weights: Any, known: list[float] | None = None
    ) -> list[Any] | None:
        """Evaluates steps on each rank, in smaller parts for as long as memory runs out.

        Returns:
            Of each rank the current and the earlier loss of each step, or None if the parameters
            have changed; None if the function has failed on a rank, so that it was dropped.

        Raises:
            SignalError: see `check`.
        """
        state = self.run.record.comparisons
        while True:
            error = None
            mine: Any = None
            try:
                now = known or self._evaluated(steps, None)
                mine = [*zip(now, self._evaluated(steps, weights), strict=True)]
            except WeightsChanged:
                pass
            except Exception as raised:
                error, mine = raised, self._failure(steps, raised)
            everyone = self.run.ranks.gather(mine)
            failures = [each for each in everyone if isinstance(each, _Failure)]
            if not failures:
                return everyone
            mistakes = [each.text for each in failures if each.is_mistake and not each.parts]
            if mistakes and not self.is_checked:
                mistake = SignalError(
                    f"{mistakes[0]}\nThe Healer calls loss_fn(batch), or in JAX with a pytree as "
                    "state loss_fn(state, batch), with a batch of healer.batches(), and expects "
                    "one number: correct the function, or pass loss_fn=None"
                )
                # Nothing is saved: the mended program trains the first step again.
                self.run.progress.reading_error = mistake
                raise mistake from error
            if not all(each.parts for each in failures):
                self.drop(f"{failures[0].text}; it is not called again")
                return None
            state.parts = 2 * max(each.parts for each in failures)
            self.run.log.info(
                f"a comparison of weights does not fit into memory: it evaluates a batch in "
                f"{state.parts} parts"
            )

    def _evaluated(self, steps: Sequence[TrainedStep], weights: Any) -> list[float]:
        """The mean loss of each step over its batches, in the parts that fit into memory."""
        assert self.function is not None
        run, contents, shares = self.run, list[Any](), list[list[float]]()
        for step in steps:
            shares.append([])
            for batch in step.batches:
                least = run.record.comparisons.parts
                for part, share in run.out_of_memory.to_evaluate(batch.content, least):
                    contents.append(part)
                    shares[-1].append(batch.weight * share)
        with isolated():
            found = run.driver.losses_of(self.function, contents, weights)
        losses = iter([float(check_scalar("loss_fn(batch)", each)) for each in found])
        return [sum(share * next(losses) for share in each) / sum(each) for each in shares]

    def _failure(self, steps: Sequence[TrainedStep], error: Exception) -> _Failure:
        """What an exception of this rank's calls means."""
        text, parts = f"loss_fn raised {type(error).__name__}: {error}", 0
        fault = classify(error).cause
        if fault is Cause.OOM:
            run = self.run
            for step in steps:
                for batch in step.batches:
                    least = run.record.comparisons.parts
                    parts = max(parts, run.out_of_memory.divisible_parts(batch.content, least))
            clear_frames(error)  # the tensors of the pass that failed
        is_mistake = fault is Cause.UNKNOWN or isinstance(error, SignalError)
        if isinstance(error, NotComparable):
            text, is_mistake = f"{error}, so no weights are compared", False
        return _Failure(text, is_mistake, parts)

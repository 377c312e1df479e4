"""`LossFunction`: evaluates the user's `loss_fn` with current and with earlier weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from healcore.core.decision import Cause
from healcore.core.errors import HealcoreError
from healcore.core.signals import SignalError, check_scalar
from healcore.runtime.data.random_states import isolated
from healcore.runtime.driver import LossFn, WeightsChanged
from healcore.runtime.faults.classification import classify
from healcore.runtime.faults.microbatches import clear_frames
from healcore.runtime.run.batch_parts import largest_part
from healcore.runtime.run.compare.trained_step import TrainedStep

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run

MAX_SAME_LOSSES = 3
"""Comparisons in a row with the same loss for different batches, after which a warning follows."""
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


Losses: TypeAlias = tuple[list[float], list[float]]
"""One loss for each step: with the current weights, and with earlier weights."""


class _EvaluationOverrun(NamedTuple):
    """An evaluation that did not fit into memory."""

    samples: int
    """Samples of its largest part."""


class _Problem(Enum):
    """What is wrong with the first calls of a `loss_fn`. The first of several kinds counts."""

    MISTAKE = "mistake"
    """The program is wrong: SignalError is raised."""
    STATE = "state"
    """The function keeps state: it is not called again."""
    CALL = "call"
    """Only these calls have failed, for example in the network: the function is called again."""


class _FirstCalls(NamedTuple):
    """What the calls on the first batch have shown on one rank."""

    kind: _Problem | None = None
    """The kind of problem, or None without one."""
    text: str = ""
    """The problem, for the user."""
    draws: bool = False
    """Whether the function draws random numbers."""


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
        gives_loss: whether the training loss is the result of `loss_fn`. Comparisons then do not
            evaluate the current weights again. True if the loop calls `Healer.loss`, or if the
            first training loss is equal to `loss_fn` of its batch.
        is_checked: whether `learn_first_step` was called.
        draws: whether `loss_fn` draws random numbers. The training loss had other numbers than a
            comparison has, so both weights are evaluated.
    """

    def __init__(self, run: Run, function: LossFn | None) -> None:
        self.run = run
        self._function: LossFn | None = None
        if function is not None:
            self._function = lambda *given: loss_of(function(*given))
        self.gives_loss = False
        self.draws = False
        self.is_checked = False
        self._same_losses = 0
        """Comparisons in a row whose batches have had the same loss."""

    @property
    def is_usable(self) -> bool:
        """Whether there is a function that may be called."""
        return self._function is not None

    def drop(self) -> None:
        """Drops the function for the rest of the process, because it cannot be used."""
        self._function = None

    def drop_if_unchecked(self, step: int) -> bool:
        """Drops the function if no step has had a batch for it, and logs the problem.

        Args:
            step: steps done.

        Returns:
            Whether the function was dropped.
        """
        if self.is_checked or not self.is_usable:
            return False
        self.drop()
        why = "no step had a batch for loss_fn: use healer.batches, or healer.loss(batch)"
        self.run.log.problem(step, f"{why} (in JAX healer.update(state, batch=batch))")
        return True

    def _warn(self, problem: str) -> None:
        """Logs a problem. The run continues without comparisons."""
        self.run.log.problem(self.run.progress.step, problem)

    def note_comparison(self, *, same_losses: bool) -> None:
        """Warns once if comparisons cannot count, because the batches have the same loss.

        Args:
            same_losses: whether the batches of a comparison have had the same loss under the
                earlier weights.
        """
        if not same_losses:
            self._same_losses = 0
            return
        self._same_losses += 1
        if self._same_losses == MAX_SAME_LOSSES:
            self.run.log.problem(
                self.run.progress.step,
                f"loss_fn has returned the same loss for different batches in {MAX_SAME_LOSSES} "
                "comparisons in a row, so none of them counts: loss_fn has to compute the loss of "
                "the batch that it gets (in healer.scan of the update `number`, for example with "
                "the key jax.random.fold_in(key, number)). If all batches of the run are equal, "
                "weights cannot be compared",
            )

    def learn_first_step(self, trained: TrainedStep, loss: float, first_weights: Any) -> None:
        """Checks `loss_fn` on the first step, and compares it with the step's training loss.

        Args:
            trained: a step with its batches.
            loss: the training loss of the step, or NaN for a dispatch of several steps.
            first_weights: copy of the weights before this step, or None.

        Raises:
            SignalError: `loss_fn` changes the batch, raises, or does not return one number. An
                exception about memory, data or the network is only a warning.
        """
        self.is_checked = True
        is_usable = self._check(trained.batches[0].content)
        if not is_usable or self.gives_loss or first_weights is None or len(trained.batches) != 1:
            return
        losses = self.losses([trained], first_weights, [math.nan])
        if losses is not None:
            _, (of_first,) = losses
            self.gives_loss = math.isclose(loss, of_first, rel_tol=SAME_LOSS)

    def losses(
        self, steps: Sequence[TrainedStep], weights: Any, known: list[float] | None = None
    ) -> Losses | None:
        """Evaluates steps with the current weights and with earlier weights.

        Args:
            steps: the steps, with their batches.
            weights: the earlier weights, a result of `Driver.copy_weights`.
            known: losses of the steps with the current weights, or None to evaluate these.

        Returns:
            Two lists with one loss per step, current and earlier weights, each the mean over all
            ranks. None if on some rank the parameters have changed since, or if the `loss_fn`
            raises: then it is dropped.
        """
        self._try_larger_parts(steps)
        while True:
            mine: Losses | _EvaluationOverrun | str | None
            failure = None
            try:
                now = known or self._evaluated(steps, None)
                mine = (now, self._evaluated(steps, weights))
            except WeightsChanged:
                mine = None
            except Exception as error:
                failure = error
                mine = self._overrun(_batches_of(steps), error)
                if mine is None:
                    mine = f"{type(error).__name__}: {error}"
            everyone = self._gather(mine, failure)
            if not self._shrink(everyone):
                break
        if None in everyone:
            return None
        failed = [item for item in everyone if isinstance(item, str)]
        if failed:
            self.drop()
            self._warn(f"loss_fn raised {failed[0]}; it is not called again")
            return None
        of_now, of_then = zip(*everyone, strict=True)
        return _mean_over_ranks(of_now), _mean_over_ranks(of_then)

    def _gather(self, item: Any, failure: Exception | None) -> list[Any]:
        """The items of all ranks. `failure`: exception of the call on this rank, or None."""
        try:
            return self.run.ranks.gather(item)
        except Exception as error:  # the other ranks wait in the forward pass (FSDP)
            raise error from failure

    def _evaluated(self, steps: Sequence[TrainedStep], weights: Any) -> list[float]:
        """The mean loss of each step over its batches."""
        losses = iter(self._losses_of(_batches_of(steps), weights))
        means = []
        for step in steps:
            weights_of_parts = [batch.weight for batch in step.batches]
            total = sum(weight * next(losses) for weight in weights_of_parts)
            means.append(total / sum(weights_of_parts))
        return means

    def _losses_of(
        self, batches: Sequence[Any], weights: Any = None, *, redraw: bool = False
    ) -> list[float]:
        """The loss of each batch, which is evaluated in the parts that fit into memory."""
        assert self._function is not None
        in_parts = [self.run.batch_parts.to_evaluate(batch) for batch in batches]
        contents = []
        for parts in in_parts:
            contents += [part for part, _ in parts]
        with isolated():
            found = self.run.driver.losses_of(self._function, contents, weights, redraw=redraw)
        of_parts = map(_checked_loss, found)
        losses = []
        for parts in in_parts:
            if len(parts) == 1:  # not multiplied, so that no bit of the loss changes
                losses.append(next(of_parts))
            else:
                losses.append(sum(weight * next(of_parts) for _, weight in parts))
        return losses

    def _overrun(self, batches: Sequence[Any], error: Exception) -> _EvaluationOverrun | None:
        """The size that has to be halved, or None if the exception is about something else."""
        if classify(error).cause is not Cause.OOM:
            return None
        size = max(map(self.run.batch_parts.size_to_evaluate, batches))
        if size <= 1:
            return None
        clear_frames(error)  # the tensors of the pass that failed
        return _EvaluationOverrun(size)

    def _try_larger_parts(self, steps: Sequence[TrainedStep]) -> None:
        """Evaluates larger parts from now on, if it is time to try them, see `PartSize`.

        Collective if a try is due, which is so at the same comparison on all ranks.
        """
        step, size = self.run.progress.step, self.run.record.evaluation_size
        larger = size.larger(step)
        if larger is None:
            return
        parts = self.run.batch_parts
        gains = any(parts.evaluation_gains_from(batch, larger) for batch in _batches_of(steps))
        if any(self.run.ranks.gather(gains)):
            size.grow(step, larger)
        else:
            size.since = step

    def _shrink(self, everyone: Sequence[Any]) -> bool:
        """Halves the parts if memory ran out on some rank, and no rank has another problem.

        Parts that were tried larger than before return to the size that fits.
        The ranks have the same items, so they take the same way.
        """
        sizes = [item.samples for item in everyone if isinstance(item, _EvaluationOverrun)]
        if not sizes or any(isinstance(item, str) for item in everyone):
            return False
        before = min(sizes)
        after = largest_part(before, 2)
        self.run.record.evaluation_size.shrink(self.run.progress.step, before, after)
        self.run.log.info(
            f"a comparison of weights does not fit into memory with {before} samples: it evaluates "
            f"{after} at a time"
        )
        return True

    def _check(self, batch: Any) -> bool:
        """Calls `loss_fn` twice with the same random numbers, and once with others.

        Returns whether it can be used, and has returned numbers on every rank.
        """
        while True:
            found, failure = self._call_first(batch)
            everyone = self._gather(found, failure)
            if not self._shrink(everyone):
                break
        # An overrun is left only if another rank has a problem, which counts.
        everyone = [item for item in everyone if not isinstance(item, _EvaluationOverrun)]
        self.draws = any(each.draws for each in everyone)
        # Of each kind, the text of the lowest rank is kept.
        problems = {each.kind: each.text for each in reversed(everyone)}
        if _Problem.MISTAKE in problems:
            mistake = SignalError(problems[_Problem.MISTAKE])
            # Nothing is saved: the mended program trains the first step again.
            self.run.progress.reading_error = mistake
            raise mistake from failure
        if _Problem.STATE in problems:
            self.drop()
        problem = problems.get(_Problem.STATE, problems.get(_Problem.CALL))
        if problem:
            self._warn(problem)
        return not problem

    def _call_first(self, batch: Any) -> tuple[_EvaluationOverrun | _FirstCalls, Exception | None]:
        """Calls `loss_fn` on this rank. Returns what it has shown, and its exception or None."""
        kind: _Problem | None = None
        text, draws, failure = "", False, None
        try:
            (first,) = self._losses_of([batch])
            (second,) = self._losses_of([batch])
            (third,) = self._losses_of([batch], redraw=True)
            draws = first != third
            # False for NaN: a loss of NaN is no sign of state.
            if abs(first - second) > SAME_LOSS * max(abs(first), SAME_LOSS):
                kind = _Problem.STATE
                text = (
                    f"loss_fn gives {first:.6g} and then {second:.6g} for the same batch, because "
                    "it keeps state or draws from a generator of its own: no weights are compared. "
                    "Change such state in the loop, and draw from the global generators"
                )
        except NotComparable as error:
            kind, failure = _Problem.STATE, error
            text = f"{error}, so no weights are compared"
        except SignalError as error:
            kind, text, failure = _Problem.MISTAKE, str(error), error
        except Exception as error:
            overrun = self._overrun([batch], error)
            if overrun is not None:
                return overrun, error
            kind, failure = _Problem.CALL, error
            text = f"loss_fn raised {type(error).__name__} on the first batch: {error}"
            fault = classify(error)
            # `fault.hint` is set for errors such as wrong shapes: the function is wrong.
            if fault.cause is Cause.UNKNOWN or fault.hint:
                kind = _Problem.MISTAKE
                how = "loss_fn(batch), or in JAX with a pytree as state loss_fn"
                text += (
                    f"\nThe Healer calls {how}(state, batch), with a batch of healer.batches(), "
                    "and expects one number: correct the function, or pass loss_fn=None"
                )
        return _FirstCalls(kind, text, draws), failure


def _batches_of(steps: Sequence[TrainedStep]) -> list[Any]:
    """The contents of all batches of some steps."""
    contents = []
    for step in steps:
        contents += [batch.content for batch in step.batches]
    return contents


def _mean_over_ranks(of_ranks: Sequence[Sequence[float]]) -> list[float]:
    """The mean loss of each step; `of_ranks` has the losses of each rank."""
    return [float(sum(losses)) / len(of_ranks) for losses in zip(*of_ranks, strict=True)]


def _checked_loss(loss: Any) -> float:
    """A loss as a number. Raises SignalError if the function has returned anything else."""
    return float(check_scalar("loss_fn(batch)", loss))

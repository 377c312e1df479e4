"""`HealedStep`: heals each step of one optimizer; measures, judges, enforces, restores.

A `StepListener` is called at each step: the `AttachLog` of `attach`, or the driver of a Healer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from healcore.core.errors import ParametersChangedError
from healcore.core.signals import Signals
from healcore.torch import gradients
from healcore.torch.attach_log import AttachLog
from healcore.torch.enforcer import Enforcer
from healcore.torch.engines import EnforcedDecision, LiveEngine
from healcore.torch.loss_mean import one_number
from healcore.torch.measurement import Measurement, Measurer, StepNorms
from healcore.torch.moments import MomentReset, moments_obstacle
from healcore.torch.optimizer_numbers import OptimizerNumbers
from healcore.torch.ranks import SignalAllReduce
from healcore.torch.step_replacement import StepPlan, StepReplacement


class StepListener(Protocol):
    """Is called at each step of one healed optimizer, see `HealedStep.set_listener`.

    A healed step has one listener at a time, which decides what becomes of the step's record:

        attach alone    `AttachLog`, which writes a line for each incident
        with a Healer   `FollowedOptimizer` of the driver, which keeps the step for the run
        Lightning       passes every call on to the `FollowedOptimizer`, and clips

    The methods run inside `optimizer.step()`, so none of them may wait for a device. One call of
    `optimizer.step()` makes these calls:

        judged ─► the optimizer's update, unless the step is skipped ─► ended ─► stepped

    A step without gradients is not judged and makes only the last call. A step that a GradScaler
    has dropped is judged later, outside of `optimizer.step()`, and makes only the first two calls.
    A step that raises makes no further call.
    """

    def judged(self, norms: StepNorms) -> None:
        """Called when the engine has judged a step, before the optimizer's update.

        `HealedStep.live_engine.pending_record()` reads the record of this step.

        Args:
            norms: the gradient norms of the step, not read on the host yet. Empty for a dropped
                step, and if the norms belong to no single parameter.
        """
        ...

    def ended(self, skipped: bool | Tensor) -> None:
        """Called when a judged step has ended, after everything was restored.

        Args:
            skipped: whether the step was skipped: a bool, or a 0-d float32 of exactly 0 or 1 on the
                device. In observe mode, and for a dropped step, always False.
        """
        ...

    def stepped(self) -> None:
        """Called when a call of `optimizer.step()` has ended, even if the step was not judged."""
        ...


@dataclass
class _CurrentStep:
    """The facts of the step that runs, or of the last step if none runs."""

    enforced: EnforcedDecision | None = None
    """The engine's decision, if the numbers are on the host."""
    skipped: bool | Tensor | None = None
    """See `StepListener.ended`. None if the step was not judged."""
    in_original: bool = False
    """Whether the decision is enforced, and the original `step` may run."""
    in_update: bool = False
    """See `HealedStep.in_update`."""


class _StepSignals(NamedTuple):
    """What the engine judges a step by, and what only this rank has measured."""

    signals: Signals
    """The signals of all ranks."""
    rank: Measurement
    """What this rank has measured."""
    divisor: Tensor | None
    """0-d float32: a GradScaler's scale that the gradients still contain, or None."""
    found_inf: Tensor | None
    """0-d float32: a GradScaler's flag, above 0 after an overflow on any rank; or None."""
    own_loss: Tensor | None
    """0-d float32: the loss of this rank. None for one rank alone."""
    bad_rates: tuple[float, ...]
    """Learning rates that are NaN or Inf."""


class HealedStep:
    """The healed `step` of one optimizer.

    A `StepReplacement` replaces `step` of the optimizer. A call of `optimizer.step()` then runs:

        _begin    evaluates a closure, if the program passes one
          _judge    _measure    Measurer.measure        gradients, losses ─► Measurement
                                SignalAllReduce.reduce  only with several ranks
                    LiveEngine.step                     Signals ─► EnforcedDecision
                    _enforce    Enforcer.enforce        clips, scales the rate, skips in the kernel
                    _report                             ─► StepListener.judged
        original  `step` as it was before `attach`, unless the host skips
        _end      Enforcer.restore, then ─► StepListener.ended, stepped

    The host skips a step by not calling the original `step`. A fused kernel skips by itself.
    A closure is evaluated before the original `step`, which receives the result.

    Args:
        optimizer: the optimizer, without a wrapper.
        live_engine: the policy's engine with the state of this run.
        measurer: measures each step of this optimizer.
        enforcer: enforces decisions on this optimizer.
        all_reduce: reduces the signals over the ranks, and knows these ranks.

    Attributes:
        attach_log: the listener until `set_listener`; it also logs steps that were not judged.
        listener: called at each step.
        replacement: the replacement of the optimizer's `step`.
        numbers: reads the numbers of the optimizer at every judged step, and names the numbers to
            be replaced for the step. None until `watch_numbers`, because it costs time.
    """

    may_reset_moments = True
    """Whether the tensors of the moments may be replaced."""

    def __init__(
        self,
        optimizer: Optimizer,
        live_engine: LiveEngine,
        measurer: Measurer,
        enforcer: Enforcer,
        all_reduce: SignalAllReduce,
    ) -> None:
        self.optimizer = optimizer
        self.live_engine = live_engine
        self.measurer = measurer
        self.enforcer = enforcer
        self.all_reduce = all_reduce
        self._current = _CurrentStep()
        self._grads_are_none = False
        """Whether the last step that was not skipped left every `.grad` None. Then a skipped step
        sets them to None too: the next backward pass would add to NaN."""
        engine = live_engine.engine
        self._moment_reset: MomentReset | None = None
        """None unless a cut of the learning rate resets the moments."""
        if engine.resets_moments and self.may_reset_moments and not moments_obstacle(optimizer):
            self._moment_reset = MomentReset(optimizer, live_engine)
        self.attach_log = AttachLog(
            optimizer,
            live_engine,
            measurer,
            all_reduce.ranks,
            resets_moments=self._moment_reset is not None,
        )
        self.listener: StepListener = self.attach_log
        self.numbers: OptimizerNumbers | None = None
        self.replacement = StepReplacement(optimizer, self._begin, self._end, self._check_running)

    @property
    def attached(self) -> bool:
        """Whether the optimizer's `step` is replaced."""
        return self.replacement.active

    @property
    def in_update(self) -> bool:
        """Whether a running step may have made a change. Stays True after the step raised.

        False while the step waits for the other ranks' signals.
        """
        return self._current.in_update

    # -- one step -------------------------------------------------------------------------------

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepPlan:
        """Evaluates the closure, judges the step, and enforces the decision.

        The result of a skipped step is the closure's loss, or None.
        """
        self._current = _CurrentStep()
        loss = None
        if not self._creates_state(kwargs):
            if args:
                closure = args[0]
            else:
                closure = kwargs.get("closure")
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
                if loss is not None and not self.measurer.losses.weight:
                    self.measurer.losses.add(one_number("the closure's loss", loss))
            self._judge()
            if closure is not None:
                reused = torch.compiler.disable(self._reused(closure, loss))
                args = (reused, *args[1:])
                kwargs = dict(kwargs)
                kwargs.pop("closure", None)
        self._current.in_original = True
        enforced = self._current.enforced
        skipped = enforced is not None and enforced.skip
        return StepPlan(skipped, loss, args, kwargs)

    def _creates_state(self, kwargs: Any) -> bool:
        """Whether torch.distributed.checkpoint creates the state of a fresh optimizer.

        It calls `step(closure=None)` at a learning rate of 0 with gradients of 0. No rank judges
        such a step, because other ranks may not take it. A sync in these cases only.
        """
        if kwargs.get("closure", 0) is not None or self.optimizer.state:
            return False
        for group in self.optimizer.param_groups:
            if float(group.get("lr", 1.0)) != 0:
                return False
        for p in gradients.parameters(self.optimizer):
            if p.grad is not None and bool(gradients.local_part(p.grad).any()):
                return False
        return True

    def _reused(self, closure: Callable[[], Any], loss: Any) -> Callable[[], Any]:
        """A closure whose first call returns `loss`, if weights and gradients are still the same.

        Sharpness-aware and schedule-free optimizers move the weights before they evaluate, and
        L-BFGS evaluates again. Further evaluations are clipped by the factor of the step.
        """
        params = gradients.parameters(self.optimizer)
        marks: list[tuple[int, int, int]] | None = _marks(params)

        def evaluate() -> Any:
            nonlocal marks
            is_same = marks == _marks(params)
            marks = None  # only the first call may reuse the loss
            if is_same:
                return loss
            other_loss = closure()
            if self._current.enforced is not None:
                with torch.no_grad():
                    self.enforcer.clip(params, self._current.enforced)
            return other_loss

        return evaluate

    def _end(self, finished: bool, skipped: bool) -> None:
        """Restores what was changed for the step. Reports the step, unless it raised."""
        self._current.in_original = False
        self.enforcer.restore()
        if not finished:
            return
        self._current.in_update = False
        if skipped and hasattr(self.optimizer.step, "_wrapped_by_lr_sched"):
            self.optimizer._opt_called = True  # type: ignore[attr-defined] -- the scheduler asks
        # Losses of a closure's later evaluations. An evaluation of a step that was not judged, for
        # example one without gradients, waits for the next step.
        self.measurer.losses.clear()
        if self._current.skipped is not None:
            params = gradients.parameters(self.optimizer)
            if skipped and self._grads_are_none:
                for p in params:
                    p.grad = None
            if not skipped:
                self._grads_are_none = all(p.grad is None for p in params)
                if self.numbers is not None:
                    self.numbers.find_changes_by_step()
            if self._moment_reset is not None:
                self._moment_reset.read_cuts(decision_is_known=self._current.enforced is not None)
            self.listener.ended(self._current.skipped)
        self.listener.stepped()

    def _check_running(self, *_: Any) -> None:
        """The pre-hook of the optimizer. A step that bypasses the replacement runs unjudged."""
        if self._current.in_original:
            return
        self.measurer.losses.clear()
        self.measurer.dropped.stepped = True
        self.attach_log.write_once(
            "step() was stored before attach(), so its steps are not judged: attach before the "
            "code that stores it (accelerate with fp16: pass accelerate's optimizer to attach)",
        )

    def detach(self) -> None:
        """See `Healing.detach`.

        The listener is removed too, so that no Healer is called for later steps. State and metrics
        of the engine stay.
        """
        if not self.attached:
            return
        self.replacement.undo()
        self.remove_listener()
        self.measurer.clear()

    # -- the listener of the steps --------------------------------------------------------------

    @property
    def has_listener(self) -> bool:
        """Whether `set_listener` has set a listener, so that the optimizer belongs to a Healer."""
        return self.listener is not self.attach_log

    def set_listener(self, listener: StepListener) -> None:
        """Sets the listener of all later steps, in place of the current listener.

        The listener is not an argument of the constructor: the Healer may be made long after
        `attach` has healed the optimizer.

        Args:
            listener: called at each step from now on. To keep the current `listener` too, pass a
                listener that passes each call on to it.
        """
        self.attach_log.drop_unread()
        self.listener = listener

    def remove_listener(self) -> None:
        """Makes `attach_log` the listener again, and releases all numbers that a Healer held."""
        self.listener = self.attach_log
        self.numbers = None

    def watch_numbers(self) -> OptimizerNumbers:
        """Starts to read the numbers of the optimizer at every judged step.

        Further calls change nothing. Ended by `remove_listener`.

        Returns:
            The numbers, which can be held in a range too.
        """
        if self.numbers is None:
            self.numbers = OptimizerNumbers(self.optimizer)
        return self.numbers

    # -- judging --------------------------------------------------------------------------------

    def judge_dropped(self) -> None:
        """See `Healing.judge_dropped`.

        The step counts as a step with non-finite gradients, and is reported to the listener like
        every other step. Only `StepListener.stepped` is not called, as no `step()` was called.
        """
        if not self.measurer.dropped.take():
            return
        with torch.no_grad():
            tensors = self.live_engine.tensors
            alone = self.all_reduce.ranks.world == 1
            self.live_engine.step(self.measurer.measure_dropped(tensors, alone=alone))
            self._report(StepNorms([], [], None))
            if self._moment_reset is not None:
                self._moment_reset.read_cuts(decision_is_known=self._current.enforced is not None)
        self.listener.ended(False)

    def on_state_loaded(self, *, keeps_signals: bool = False) -> None:
        """Drops what belongs to an earlier state. Call it after the engine's state is replaced.

        Records that were not read yet are logged first, unless a Healer reads the records.

        Args:
            keeps_signals: whether the losses and the evaluation since the last step still hold.
        """
        if not keeps_signals:
            self.measurer.clear()
        self.attach_log.log_unread()
        self.attach_log.restart()
        if self._moment_reset is not None:
            self._moment_reset.forget()

    @torch.no_grad()
    def _judge(self) -> None:
        """Measures the step, runs the engine and enforces its decision, if there are gradients."""
        parameters = gradients.parameters(self.optimizer)
        params: list[Tensor] = []
        for p in parameters:
            if p.grad is not None:
                params.append(p)
        # Before the measurement, because the first access of `members` finds who holds which part.
        has_ranks = len(self.all_reduce.ranks.members) > 1
        if not params and not has_ranks:
            return
        if len(parameters) != self.live_engine.tensors:
            self._fit_number(parameters)
        measured = self._measure(parameters, has_ranks=has_ranks)
        if measured is None:
            return
        # A collective that raised before this line has changed nothing.
        self._current.in_update = True
        enforced = self.live_engine.step(measured.signals, measured.found_inf, measured.divisor)
        self._current.skipped = False
        if self._moment_reset is not None:
            self._moment_reset.carry_out(skip=enforced.skip)
        if self.numbers is not None:
            self.numbers.read()
        if self.live_engine.engine.mode != "observe":
            self._enforce(parameters, params, measured, enforced)
        norms = StepNorms(
            params, measured.rank.norms, measured.divisor, measured.own_loss, measured.bad_rates
        )
        self._report(norms)

    def _fit_number(self, parameters: Sequence[Tensor]) -> None:
        """Makes the engine's state fit the number of parameters, which a program may change.

        Added parameters get a history of their own. With a clipping history for each parameter a
        removed parameter raises, because the histories belong to parameters by their position.
        """
        live = self.live_engine
        if len(parameters) > live.tensors:
            live.grow(len(parameters))
        if live.engine.per_tensor and len(parameters) != live.tensors:
            raise ParametersChangedError(
                f"the optimizer had {live.tensors} parameters, now {len(parameters)}, and this "
                "policy has a clipping history for each: detach() and attach again"
            )

    def _measure(self, parameters: Sequence[Tensor], *, has_ranks: bool) -> _StepSignals | None:
        """Measures the step of all ranks. None if no rank has a gradient: there is no step."""
        divisor, found_inf = self.enforcer.amp_flags()
        evaluation = self.measurer.eval_loss
        rank = self.measurer.measure(parameters, divisor, self.all_reduce.ranks)
        signals = rank.signals
        own_loss: Tensor | None = None
        if has_ranks:
            own_loss = signals.loss
            signals, found_inf = self.all_reduce.reduce(
                signals, rank.squares, found_inf, self.live_engine.compared_decision
            )
        if signals.grad_norm is None:
            self.measurer.eval_loss = evaluation  # is kept for the next step
            return None
        signals, bad_rates = self.measurer.mark_bad_rates(signals)
        signals = self.measurer.overflows.mark(signals, found_inf)
        return _StepSignals(signals, rank, divisor, found_inf, own_loss, bad_rates)

    def _enforce(
        self,
        parameters: Sequence[Tensor],
        params: Sequence[Tensor],
        measured: _StepSignals,
        enforced: EnforcedDecision,
    ) -> None:
        """Enforces the engine's decision. `params` are the parameters with a gradient."""
        if self.numbers is not None:
            # First, because `needs_host` depends on the momentum of the step.
            for group, entry, value in self.numbers.replacements():
                self.enforcer.replace(group, entry, value)
        if isinstance(enforced.skip, Tensor) and self.enforcer.needs_host(params):
            enforced = enforced.to_host()
        clip_norm = measured.rank.clip_norm
        if clip_norm is not None:
            factor = self.measurer.clip_factor(clip_norm, enforced.grad_scale)
            enforced = enforced._replace(clip_factor=factor)
        self.enforcer.enforce(parameters, enforced, measured.divisor)
        self._current.skipped = enforced.skip
        if not isinstance(enforced.skip, Tensor):
            self._current.enforced = enforced
            if self._moment_reset is not None:
                self._moment_reset.note(enforced)

    def _report(self, norms: StepNorms) -> None:
        """Calls the listener with a judged step. A subclass may change the norms."""
        if self._moment_reset is not None:
            self._moment_reset.keep_record()
        self.listener.judged(norms)


def _marks(params: Sequence[Tensor]) -> list[tuple[int, int, int]]:
    """Numbers of writes in place of each parameter and gradient, and the gradient's identity."""
    marks: list[tuple[int, int, int]] = []
    for p in params:
        grad = p.grad
        if grad is None:
            marks.append((p._version, id(None), -1))
        else:
            marks.append((p._version, id(grad), grad._version))
    return marks

"""The handle that `attach` returns: hooks around `optimizer.step()`, and what a loop tells them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from healcore.core.engine import Engine
from healcore.core.verdict import Action, Cause, Decision
from healcore.torch import gradients
from healcore.torch.agreeing import Agreement
from healcore.torch.amp import AmpAttributes
from healcore.torch.device_seat import DeviceSeat, read_order
from healcore.torch.enforcing import Enforcer
from healcore.torch.errors import ParametersChangedError
from healcore.torch.host_seat import HostSeat
from healcore.torch.late_loss import LateLoss
from healcore.torch.losses import checked
from healcore.torch.measurement import Judged, Order
from healcore.torch.measuring import Measurer
from healcore.torch.nesting import OpenStep
from healcore.torch.own_step import LeftOut
from healcore.torch.reevaluation import Undo
from healcore.torch.report import Report
from healcore.torch.telling import Teller


class Healing:
    """One optimizer under one policy. Made by `attach`; not by hand.

    Between two steps nothing of healcore lies on the optimizer but two hooks: learning rates,
    gradients, `grad_scale` and `found_inf` are lent for the length of a step and given back.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        engine: Engine,
        seat: HostSeat | DeviceSeat,
        measurer: Measurer,
        enforcer: Enforcer,
        agreement: Agreement,
        report: Callable[[], Report],
    ) -> None:
        self.optimizer = optimizer
        self.engine = engine
        self.seat = seat
        self._measurer = measurer
        self._enforcer = enforcer
        self._agreement = agreement
        self._report = report
        self._groups = len(gradients.parameters(optimizer))
        self._teller = Teller(type(optimizer).__name__, engine)
        self._late_loss = LateLoss()
        self._open = OpenStep()
        self._undo = Undo(optimizer)
        self._judged = self._gone_bad = False
        self._order: Order | None = None
        self._held: bool | Tensor | None = None
        self._last_judged: Judged | None = None
        self.on_judged: Callable[[Judged], None] | None = None
        """Called at every step that was judged, before the optimizer takes it."""
        self.on_ended: Callable[[bool | Tensor], None] | None = None
        """Called after it, with whether it was skipped, be it by a GradScaler: a bool where the
        host knows, else a 0-d float32 of exactly 0 or 1. In observe mode always False."""
        self.grows = False
        """Whether a policy that clips each parameter by its own history begins one for parameters
        that are added, instead of raising `ParametersChangedError`."""
        self.own_loss = True
        """Whether what is observed is this optimizer's loss, and not also that of others, whose
        backward passes come at other times."""

        # Dynamo drops what an ordinary hook writes to the optimizer; disabled, it breaks the graph
        # here and guards on the attributes as they are when the kernel is reached.
        before: Any = torch.compiler.disable(self._before)
        after: Any = torch.compiler.disable(self._after)
        before.__healing__ = self
        self._handles = [
            optimizer.register_step_pre_hook(before),
            optimizer.register_step_post_hook(after),
        ]

    # -- what the training loop says ------------------------------------------------------------

    def observe(self, loss: Tensor | float) -> None:
        """Reports the loss of one (micro-)batch; the step sees the mean since the last step.

        Nothing is read on the host. With several ranks the step sees the mean over all of them, and
        each rank may pass its own loss or one that was reduced already.

        Args:
            loss: a number, or a tensor of one element on any device; NaN and Inf are welcome.

        Raises:
            SignalError: None, not a number, or more than one. Nothing has changed then.
        """
        value = checked("loss", loss)
        self.judge_dropped()
        if self.own_loss:
            self._late_loss.observed(loss)
        self._measurer.add_loss(value)
        if self.on_judged is None:
            self._teller.observed()

    def observe_eval(self, eval_loss: Tensor | float) -> None:
        """Reports an evaluation's loss; the next step sees it.

        Raises:
            SignalError: as for `observe`.
        """
        self._measurer.add_beside("eval_loss", eval_loss)

    def observe_update_norm(self, update_norm: Tensor | float) -> None:
        """Reports the L2 norm of the last update, for policies that watch it.

        It is not measured here: that would take a copy of the parameters and a pass over both.

        Raises:
            SignalError: as for `observe`.
        """
        self._measurer.add_beside("update_norm", update_norm)

    def announce(self) -> None:
        """Says that the next step differs on purpose (LR, batch size, data, weights).

        Baselines warm up again, and only non-finite values are alarms for `grace_steps` steps.
        """
        self.seat.announce()

    def decline(self) -> None:
        """Says that the rollback ordered last is not carried out: `Engine.decline`."""
        self.seat.decline()

    def discard(self) -> None:
        """Forgets the losses since the last step: call it after throwing a step away yourself."""
        self._measurer.clear()

    @torch.no_grad()
    def judge_dropped(self) -> None:
        """Judges a step that the GradScaler has dropped without calling the optimizer, if any.

        `observe` calls it; a loop without losses may, once after each `scaler.update()`. There is
        nothing left to skip: it is for what the policy orders when such steps do not end.
        """
        alone = self._agreement.world == 1
        seen = self._measurer.dropped(self.optimizer, self._groups, alone=alone)
        if seen is None:
            return
        if isinstance(self.seat, HostSeat):
            self.seat.order(seen)
        else:
            self.seat.advance(seen)
        self._tell(Judged([], [], None))

    # -- what the training loop can ask ---------------------------------------------------------

    @property
    def has_loss(self) -> bool:
        """Whether a loss was reported since the last step: an accumulation has begun."""
        return self._measurer.has_loss

    @property
    def has_seen_loss(self) -> bool:
        """Whether any step was judged with a loss so far."""
        return "loss" in self._measurer.seen

    @property
    def ranks(self) -> int:
        """How many ranks decide together; 1: nothing is exchanged."""
        return self._agreement.world

    @property
    def in_step(self) -> bool:
        """Whether the optimizer is in its step; True as well after one that has raised."""
        return self._open.is_open

    @property
    def attached(self) -> bool:
        """Whether the hooks are in place."""
        return bool(self._handles)

    @property
    def decision(self) -> Decision | None:
        """The last step's decision as enforced, as arrays where the engine sits; no sync.

        None before the first step. NumPy in the host seat, torch in the device seat.
        """
        self._teller.is_polled = True
        return self.seat.decision

    def last_decision(self) -> Decision | None:
        """The last step's decision in Python values (`Cause`, `Action`, bool, float).

        On an accelerator this waits for the step: a sync. None before the first step.
        """
        self._teller.is_polled = True
        found = self.seat.decision
        if found is None:
            return None
        groups = found.group_scale
        return Decision(
            grad_scale=float(found.grad_scale),
            skip=bool(found.skip),
            lr_scale=float(found.lr_scale),
            action=Action(int(found.action)),
            cause=Cause(int(found.cause)),
            rollback_depth=int(found.rollback_depth),
            group_scale=None if groups is None else groups.tolist(),
        )

    def metrics(self) -> dict[str, Tensor]:
        """Named 0-d tensors for a logger (`heal/grad_norm`, `heal/skips`, ...); no sync.

        Copies: they keep their values when the next step is taken.
        """
        return self.seat.metrics()

    def gradient_norms(self, named: Iterable[tuple[str, Tensor]]) -> dict[str, float]:
        """The norm of each parameter's gradient at the last step, before clipping, for a logger.

        They were computed anyway; reading them is one sync on an accelerator, so call it at the
        steps that are logged. With sharded parameters on every rank.

        Args:
            named: ``model.named_parameters()``.

        Returns:
            Name -> L2 norm, for the named parameters that this optimizer has and that had a
            gradient; empty before the first step.
        """
        last = self._last_judged
        if last is None:
            return {}
        values = dict(zip(map(id, last.params), last.on_host().tolist(), strict=True))
        return {name: values[id(each)] for name, each in named if id(each) in values}

    def report(self) -> Report:
        """Which seat and which way to skip are in use, why, and what they cost."""
        return self._report()

    # -- saving ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The engine's state, JSON-safe and without a framework in it (`Engine.to_dict`).

        What JAX or NumPy saved can be loaded here and the other way round. A sync.
        """
        return self.seat.to_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a saved state as if the run had never stopped.

        Raises:
            StateError: it is another policy's, damaged, or of another model. Nothing is loaded.
        """
        self._load(state, rollback=False)

    def on_rollback(self, state: dict[str, Any]) -> None:
        """Goes back to a checkpoint's state: detectors of then, budgets and LR multiplier of now.

        Raises:
            StateError: as for `load_state_dict`.
        """
        self._load(state, rollback=True)

    def _load(self, state: dict[str, Any], *, rollback: bool) -> None:
        self.seat.load(state, rollback=rollback)
        self._measurer.clear()
        if Undo.applies(self.optimizer) and self.engine.mode != "observe":
            # L-BFGS takes its rate from the step before, see `_before`: here there is none.
            scale = float(self.seat.state.lr.scale)
            self._order = Order(skip=False, grad_scale=1.0, lr_scale=scale, group_scale=None)

    def settle(self) -> None:
        """Takes back what a step that raised has left on the optimizer; not for use in a step."""
        self._give_back(self.optimizer)

    def detach(self) -> None:
        """Takes the hooks off; the optimizer is as if `attach` had never been called.

        State and metrics stay readable. Calling it again does nothing.
        """
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.on_judged = self.on_ended = None
        self._give_back(self.optimizer)
        self._open.forget()
        self._measurer.clear()

    def __repr__(self) -> str:
        state = f"{self.seat.name} engine" if self.attached else "detached"
        return f"<Healing of {type(self.optimizer).__name__}, {state}>"

    # -- around the step ------------------------------------------------------------------------

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """The pre-hook: judges the step, or wraps the closure whose backward comes first."""
        if not self._open.enter():
            return None  # step() of a subclass has called super().step()
        self._give_back(optimizer)  # a step that raised has had no post-hook
        self._judged = self._gone_bad = False
        self._held = None
        last, self._order = self._order, None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._judge(optimizer)
            return None
        self._enforcer.own_step.watch(optimizer)
        self._undo.record(optimizer)
        if Undo.applies(optimizer) and last is not None and last.lr_scale != 1.0:
            # L-BFGS reads its rate before the closure runs: it gets the last known multiplier.
            self._enforcer.slow_down(optimizer, last.lr_scale)
        healed = torch.compiler.disable(self._healed(optimizer, closure))
        if len(args) > 1:
            return (args[0], healed, *args[2:]), kwargs
        return args, {**kwargs, "closure": healed}

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """The post-hook: everything lent goes back."""
        if not self._open.leave():
            return
        if self._gone_bad or (self._order is not None and self._order.skip):
            self._undo.back(optimizer)
        self._give_back(optimizer)
        self._measurer.clear()  # losses of a closure's later evaluations
        if self._held is not None and self.on_ended is not None:
            self.on_ended(self._gone_bad or self._held)

    def _give_back(self, optimizer: Optimizer) -> None:
        self._enforcer.give_back(optimizer)
        self._undo.forget()

    def _healed(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The user's closure, judged after its first evaluation and watched after the others."""

        def evaluate() -> Any:
            self._undo.evaluating(optimizer)
            loss = closure()
            if self._judged:
                self._watch(optimizer)
            else:
                if loss is not None and not self._measurer.has_loss:
                    self._measurer.add_loss(loss, "the closure's loss")
                self._judge(optimizer)
            if self._enforcer.own_step.can_end and self._undo.is_complete:
                self._open.unwind()
                raise LeftOut(loss)
            return loss

        return evaluate

    @torch.no_grad()
    def _watch(self, optimizer: Optimizer) -> None:
        """A later evaluation in the same step: the same factor, or, if non-finite, no step."""
        order = self._order
        if order is None:
            return
        everything = gradients.parameters(optimizer)
        grads = [p.grad for p in everything if p.grad is not None]
        if order.skip or self._gone_bad:
            self._enforcer.hold(optimizer, everything)
        elif grads and not self._measurer.all_finite(grads):
            self._gone_bad = True
            self._enforcer.hold(optimizer, everything)
        else:
            self._enforcer.scale(optimizer, everything, order)

    @torch.no_grad()
    def _judge(self, optimizer: Optimizer) -> None:
        """Measures, asks the engine and has its word enforced. Without gradients: a no-op."""
        self._judged = True
        everything = gradients.parameters(optimizer)
        params = [p for p in everything if p.grad is not None]
        together = self._agreement.world > 1
        if not params and not together:
            self._measurer.clear()
            return
        if self.grows and len(everything) > self._groups:
            self._groups = len(everything)
            self.seat.grow(self._groups)
        if self.engine.per_tensor and len(everything) != self._groups:
            raise ParametersChangedError(
                f"the optimizer had {self._groups} parameters at attach, now {len(everything)}, "
                "and this policy clips each by its own history: detach() and attach again"
            )
        divisor, found = AmpAttributes.read(optimizer)
        seen = self._measurer.measure(optimizer, everything, grad_divisor=divisor, found_inf=found)
        self._measurer.clear()
        rehearsal = seen.rehearsal and _is_zero(seen.grad_norm)
        if params and not rehearsal and not self._late_loss.is_over:
            self._late_loss.stepped(params, seen.loss is not None)
        if together:
            if rehearsal:
                return
            seen = self._agreement.agree(seen, self.seat.decision)
        if seen.grad_norm is None:
            return
        seen = self._measurer.void_overflow(seen)
        enforces, self._held = self.engine.mode != "observe", False
        if isinstance(self.seat, HostSeat):
            order = self.seat.order(seen)
        else:
            on_host = self._enforcer.needs_host(optimizer, params)
            told = self.seat.advance(seen)
            if enforces and not on_host:
                self._enforcer.hand_over(optimizer, everything, params, told)
                self._held = told.found_inf
            order = read_order(told) if enforces and on_host else None
        if enforces and order is not None:
            self._order, self._held = order, order.skip
            if Undo.applies(optimizer):  # too late for this step's rate, see `_before`
                order = order._replace(lr_scale=1.0)
            self._enforcer.carry_out(optimizer, everything, order, seen.grad_divisor)
        self._last_judged = Judged(params, self._measurer.tensor_norms, seen.grad_divisor)
        self._tell(self._last_judged)

    def _tell(self, judged: Judged) -> None:
        """A step was judged: a Healer is told, or a person."""
        if self.on_judged is not None:
            self.on_judged(judged)
        else:
            self._teller.speaks = self._agreement.is_first
            self._teller.judged(self.seat, has_seen_loss=self.has_seen_loss)


def _is_zero(norm: Tensor | None) -> bool:
    """A sync, for a fresh optimizer only: torch steps it once to save it, maybe on one rank."""
    return norm is None or not norm.cpu().numpy()

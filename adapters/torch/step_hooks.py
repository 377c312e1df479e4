"""What happens around `optimizer.step()`: measure, judge, enforce, and give back what was lent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from healcore.core.engine import Engine
from healcore.torch import gradients
from healcore.torch.agreeing import Agreement
from healcore.torch.amp import AmpAttributes
from healcore.torch.device_seat import DeviceSeat, read_order
from healcore.torch.enforcing import Enforcer
from healcore.torch.errors import ParametersChangedError
from healcore.torch.host_seat import HostSeat
from healcore.torch.late_loss import LateLoss
from healcore.torch.measurement import Judged, Order
from healcore.torch.measuring import Measurer
from healcore.torch.nesting import OpenStep
from healcore.torch.own_step import LeftOut
from healcore.torch.reevaluation import Undo
from healcore.torch.telling import Teller


class StepHooks:
    """The two hooks of one optimizer.

    Between two steps nothing of healcore lies on the optimizer but these: learning rates,
    gradients, `grad_scale` and `found_inf` are lent for the length of a step and given back.

    Attributes:
        last_judged: norms of the last step that was judged.
        on_judged: called at every step that was judged, before the optimizer takes it.
        on_ended: called after it, with whether it was skipped, be it by a GradScaler: a bool where
            the host knows, else a 0-d float32 of exactly 0 or 1. In observe mode always False.
        grows: whether a policy that clips each parameter by its own history begins one for
            parameters that are added, instead of raising `ParametersChangedError`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        engine: Engine,
        seat: HostSeat | DeviceSeat,
        measurer: Measurer,
        enforcer: Enforcer,
        agreement: Agreement,
    ) -> None:
        self._optimizer = optimizer
        self._engine = engine
        self._seat = seat
        self._measurer = measurer
        self._enforcer = enforcer
        self._agreement = agreement
        self._groups = len(gradients.parameters(optimizer))
        self._open = OpenStep()
        self._undo = Undo(optimizer)
        self._judged = self._gone_bad = False
        self._order: Order | None = None
        self._held: bool | Tensor | None = None
        self.teller = Teller(type(optimizer).__name__, engine)
        self.late_loss = LateLoss()
        self.last_judged: Judged | None = None
        self.on_judged: Callable[[Judged], None] | None = None
        self.on_ended: Callable[[bool | Tensor], None] | None = None
        self.grows = False

        # Dynamo drops what an ordinary hook writes to the optimizer; disabled, it breaks the graph
        # here and guards on the attributes as they are when the kernel is reached.
        self.before: Any = torch.compiler.disable(self._before)
        after: Any = torch.compiler.disable(self._after)
        self._handles = [
            optimizer.register_step_pre_hook(self.before),
            optimizer.register_step_post_hook(after),
        ]

    @property
    def attached(self) -> bool:
        """Whether the hooks are in place."""
        return bool(self._handles)

    @property
    def in_step(self) -> bool:
        """Whether the optimizer is in its step; True as well after one that has raised."""
        return self._open.is_open

    @torch.no_grad()
    def judge_dropped(self) -> None:
        """Judges a step that the GradScaler has dropped without calling the optimizer, if any."""
        alone = self._agreement.world == 1
        seen = self._measurer.dropped(self._optimizer, self._groups, alone=alone)
        if seen is None:
            return
        if isinstance(self._seat, HostSeat):
            self._seat.order(seen)
        else:
            self._seat.advance(seen)
        self._tell(Judged([], [], None))

    def loaded(self) -> None:
        """The engine has another state."""
        self._measurer.clear()
        if Undo.applies(self._optimizer) and self._engine.mode != "observe":
            # L-BFGS takes its rate from the step before, see `_before`: here there is none.
            scale = float(self._seat.state.lr.scale)
            self._order = Order(skip=False, grad_scale=1.0, lr_scale=scale, group_scale=None)

    def settle(self) -> None:
        """Takes back what a step that raised has left on the optimizer; not for use in a step."""
        self._give_back(self._optimizer)

    def detach(self) -> None:
        """Takes the hooks off; the optimizer is as if `attach` had never been called."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.on_judged = self.on_ended = None
        self._give_back(self._optimizer)
        self._open.forget()
        self._measurer.clear()

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
            self._seat.grow(self._groups)
        if self._engine.per_tensor and len(everything) != self._groups:
            raise ParametersChangedError(
                f"the optimizer had {self._groups} parameters at attach, now {len(everything)}, "
                "and this policy clips each by its own history: detach() and attach again"
            )
        divisor, found = AmpAttributes.read(optimizer)
        seen = self._measurer.measure(optimizer, everything, grad_divisor=divisor, found_inf=found)
        self._measurer.clear()
        rehearsal = seen.rehearsal and _is_zero(seen.grad_norm)
        if params and not rehearsal and not self.late_loss.is_over:
            self.late_loss.stepped(params, seen.loss is not None)
        if together:
            if rehearsal:
                return
            seen = self._agreement.agree(seen, self._seat.decision)
        if seen.grad_norm is None:
            return
        seen = self._measurer.void_overflow(seen)
        enforces, self._held = self._engine.mode != "observe", False
        if isinstance(self._seat, HostSeat):
            order = self._seat.order(seen)
        else:
            on_host = self._enforcer.needs_host(optimizer, params)
            told = self._seat.advance(seen)
            if enforces and not on_host:
                self._enforcer.hand_over(optimizer, everything, params, told)
                self._held = told.found_inf
            order = read_order(told) if enforces and on_host else None
        if enforces and order is not None:
            self._order, self._held = order, order.skip
            if Undo.applies(optimizer):  # too late for this step's rate, see `_before`
                order = order._replace(lr_scale=1.0)
            self._enforcer.carry_out(optimizer, everything, order, seen.grad_divisor)
        self.last_judged = Judged(params, self._measurer.tensor_norms, seen.grad_divisor)
        self._tell(self.last_judged)

    def _tell(self, judged: Judged) -> None:
        """A step was judged: a Healer is told, or a person."""
        if self.on_judged is not None:
            self.on_judged(judged)
        else:
            self.teller.speaks = self._agreement.is_first
            self.teller.judged(self._seat, has_seen_loss="loss" in self._measurer.seen)


def _is_zero(norm: Tensor | None) -> bool:
    """A sync, for a fresh optimizer only: torch steps it once to save it, maybe on one rank."""
    return norm is None or not norm.cpu().numpy()

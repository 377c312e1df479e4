"""The handle that `attach` returns: what a training loop tells it, asks it and saves of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from healcore.core.engine import Engine
from healcore.core.verdict import Action, Cause, Decision
from healcore.torch.agreeing import Agreement
from healcore.torch.device_seat import DeviceSeat
from healcore.torch.host_seat import HostSeat
from healcore.torch.losses import checked
from healcore.torch.measuring import Measurer
from healcore.torch.report import Report
from healcore.torch.step_hooks import StepHooks


class Healing:
    """One optimizer under one policy. Made by `attach`; not by hand.

    Attributes:
        hooks: what happens around a step.
        own_loss: whether what is observed is this optimizer's loss, and not also that of others,
            whose backward passes come at other times.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        engine: Engine,
        seat: HostSeat | DeviceSeat,
        measurer: Measurer,
        hooks: StepHooks,
        agreement: Agreement,
        report: Callable[[], Report],
    ) -> None:
        self.optimizer = optimizer
        self.engine = engine
        self.seat = seat
        self.hooks = hooks
        self.own_loss = True
        self._measurer = measurer
        self._agreement = agreement
        self._report = report
        hooks.before.__healing__ = self

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
            self.hooks.late_loss.observed(loss)
        self._measurer.add_loss(value)
        if self.hooks.on_judged is None:
            self.hooks.teller.observed()

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

    def expect_change(self) -> None:
        """Says that the next step differs on purpose (LR, batch size, data, weights).

        Baselines warm up again, and only non-finite values are alarms for `grace_steps` steps.
        """
        self.seat.expect_change()

    def decline(self) -> None:
        """Says that the rollback ordered last is not carried out: `Engine.decline`."""
        self.seat.decline()

    def discard(self) -> None:
        """Forgets the losses since the last step: call it after throwing a step away yourself."""
        self._measurer.clear()

    def judge_dropped(self) -> None:
        """Judges a step that the GradScaler has dropped without calling the optimizer, if any.

        `observe` calls it; a loop without losses may, once after each `scaler.update()`. There is
        nothing left to skip: it is for what the policy orders when such steps do not end.
        """
        self.hooks.judge_dropped()

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
        return self.hooks.in_step

    @property
    def attached(self) -> bool:
        """Whether the hooks are in place."""
        return self.hooks.attached

    @property
    def decision(self) -> Decision | None:
        """The last step's decision as enforced, as arrays where the engine sits; no sync.

        None before the first step. NumPy in the host seat, torch in the device seat.
        """
        self.hooks.teller.is_polled = True
        return self.seat.decision

    def last_decision(self) -> Decision | None:
        """The last step's decision in Python values (`Cause`, `Action`, bool, float).

        On an accelerator this waits for the step: a sync. None before the first step.
        """
        self.hooks.teller.is_polled = True
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
        last = self.hooks.last_judged
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

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a saved state as if the run had never stopped.

        Raises:
            StateError: it is another policy's, damaged, or of another model. Nothing is loaded.
        """
        self._load(state, rollback=False)

    def on_rollback(self, state: Mapping[str, Any]) -> None:
        """Goes back to a checkpoint's state: detectors of then, budgets and LR multiplier of now.

        Raises:
            StateError: as for `load_state_dict`.
        """
        self._load(state, rollback=True)

    def _load(self, state: Mapping[str, Any], *, rollback: bool) -> None:
        self.seat.load(state, rollback=rollback)
        self.hooks.loaded()

    def settle(self) -> None:
        """Takes back what a step that raised has left on the optimizer; not for use in a step."""
        self.hooks.settle()

    def detach(self) -> None:
        """Takes the hooks off; the optimizer is as if `attach` had never been called.

        State and metrics stay readable. Calling it again does nothing.
        """
        self.hooks.detach()

    def __repr__(self) -> str:
        state = f"{self.seat.name} engine" if self.attached else "detached"
        return f"<Healing of {type(self.optimizer).__name__}, {state}>"

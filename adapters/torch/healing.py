"""`Healing`: the handle that `attach` returns, and its `Report`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from healcore.core.verdict import Action, Cause, Decision
from healcore.torch.healed_step import HealedStep
from healcore.torch.losses import checked


@dataclass(frozen=True, kw_only=True)
class Report:
    """How one optimizer is healed. `str()` formats the report as lines for printing."""

    engine: str
    """Where the engine runs: host (NumPy) or device (torch)."""
    engine_reason: str
    skip: str
    """How a step is skipped: found_inf (in the fused kernel) or not run."""
    syncs_per_step: int
    """Host syncs that healcore adds to each step."""
    ranks: int
    """Number of ranks that decide together, by one all_reduce per step."""
    compiled: bool
    """Whether the engine's step runs through torch.compile."""

    def __str__(self) -> str:
        lines = [
            f"engine  {self.engine}{', compiled' if self.compiled else ''}: {self.engine_reason}",
            f"skip    {self.skip}",
            f"syncs   {self.syncs_per_step} per step",
        ]
        if self.ranks > 1:
            lines.append(f"ranks   {self.ranks} decide together, by one all_reduce per step")
        return "\n".join(lines)


class Healing:
    """Handle of an optimizer that a policy heals. Created by `attach`, not directly.

    Attributes:
        live_engine: the engine with its state.
        hooks: the optimizer's healed step.
    """

    def __init__(self, hooks: HealedStep, *, engine_reason: str) -> None:
        self.optimizer = hooks.optimizer
        self.live_engine = hooks.live_engine
        self.engine = hooks.live_engine.engine
        self.hooks = hooks
        self._measurer = hooks.measurer
        self._engine_reason = engine_reason
        hooks.check.__healing__ = self

    # -- signals from the training loop ---------------------------------------------------------

    def observe(self, loss: Tensor | float, *, weight: float = 1.0) -> None:
        """Reports the loss of one (micro-)batch. A step is judged by the mean since the last step.

        No host sync. With several ranks a step is judged by the mean over the ranks.
        A rank may pass its own loss or a reduced loss.

        Args:
            loss: a number, or a tensor of one element on any device. NaN and Inf are accepted.
            weight: weight of this loss in the mean, above 0, for parts of different size.

        Raises:
            SignalError: `loss` is not a single real number. Nothing was changed.
        """
        value = checked("loss", loss)
        self.judge_dropped()
        self._measurer.add_loss(value, weight=weight)

    def observe_eval(self, eval_loss: Tensor | float) -> None:
        """Reports the loss of an evaluation, which the policy reads at the next step.

        Raises:
            SignalError: as for `observe`.
        """
        self._measurer.add_side_signal("eval_loss", eval_loss)

    def observe_update_norm(self, update_norm: Tensor | float) -> None:
        """Reports the L2 norm of the last update, for policies that read it.

        healcore does not measure this norm.

        Raises:
            SignalError: as for `observe`.
        """
        self._measurer.add_side_signal("update_norm", update_norm)

    def expect_change(self) -> None:
        """Announces that the next step differs on purpose (LR, batch size, data, weights).

        Baselines warm up again. For `grace_steps` steps only non-finite values are alarms.
        """
        self.live_engine.expect_change()

    def discard(self) -> None:
        """Drops the signals since the last step, for loops that discard a step themselves."""
        self._measurer.clear()

    def drop_losses(self) -> None:
        """Drops the losses since the last step, but keeps the loss of an evaluation."""
        self._measurer.drop_losses()

    def judge_dropped(self) -> None:
        """Judges a step that the GradScaler skipped without calling the optimizer, if any.

        The policy can then act on overflows that do not end. `observe` calls this method. A loop
        without losses may call it once after each `scaler.update()`.
        """
        self.hooks.judge_dropped()

    # -- results for the training loop ----------------------------------------------------------

    @property
    def has_loss(self) -> bool:
        """Whether a loss was observed since the last step."""
        return self._measurer.has_loss

    @property
    def has_seen_loss(self) -> bool:
        """Whether any step has had a loss, including steps that a GradScaler dropped."""
        return self._measurer.has_seen_loss

    @property
    def ranks(self) -> int:
        """Number of ranks that decide together."""
        return self.hooks.all_reduce.world

    @property
    def attached(self) -> bool:
        """Whether the policy judges the optimizer's steps."""
        return self.hooks.attached

    @property
    def decision(self) -> Decision | None:
        """The last step's decision as enforced, or None before the first step. No sync.

        NumPy scalars from the host engine, torch tensors from the device engine.
        """
        return self.live_engine.decision

    def last_decision(self) -> Decision | None:
        """The last step's decision in Python values (`Cause`, `Action`, bool, float).

        None before the first step. A sync on an accelerator.
        """
        decision = self.live_engine.decision
        if decision is None:
            return None
        groups = decision.group_scale
        return Decision(
            grad_scale=float(decision.grad_scale),
            skip=bool(decision.skip),
            lr_scale=float(decision.lr_scale),
            action=Action(int(decision.action)),
            cause=Cause(int(decision.cause)),
            rollback_depth=int(decision.rollback_depth),
            group_scale=None if groups is None else groups.tolist(),
        )

    def metrics(self) -> dict[str, Tensor]:
        """Named 0-d tensors for a logger (`heal/grad_norm`, `heal/skips`, ...). Copies, no sync.

        `heal/loss` is NaN until a step with a loss is judged.
        """
        found = self.live_engine.metrics()
        if not self.has_seen_loss:
            loss = found["heal/loss"]  # 0 at the start, unlike in a loaded state
            found["heal/loss"] = loss.masked_fill(loss == 0, math.nan)
        return found

    def report(self) -> Report:
        """Returns how this optimizer is healed: engine, skips and clips, their reasons and cost."""
        live_engine = self.live_engine
        on_host = live_engine.name == "host"
        by_flag = not on_host and self.hooks.enforcer.by_kernel
        reads = on_host or (not by_flag and self.engine.mode != "observe")
        return Report(
            engine=live_engine.name,
            engine_reason=self._engine_reason,
            skip="found_inf" if by_flag else "not run",
            syncs_per_step=int(reads) * (self._measurer.home.type != "cpu"),
            ranks=self.ranks,
            compiled=live_engine.compiled,
        )

    # -- saving ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The engine's state, JSON-safe and framework-neutral (`Engine.to_dict`). A sync.

        A state saved under JAX or NumPy can be loaded here, and vice versa.
        """
        return self.live_engine.to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a saved state, so that decisions continue as if the run had never stopped.

        Raises:
            StateError: the state is damaged, or from another policy or model. Nothing is loaded.
        """
        self._load(state, rollback=False)

    def on_rollback(self, state: dict[str, Any]) -> None:
        """Loads a checkpoint's state after a rollback. Keeps current budgets and LR multiplier.

        Raises:
            StateError: as for `load_state_dict`.
        """
        self._load(state, rollback=True)

    def _load(self, state: Mapping[str, Any], *, rollback: bool) -> None:
        self.live_engine.load(state, rollback=rollback)
        self.hooks.on_state_loaded()

    def detach(self) -> None:
        """Restores `step`: the optimizer is as if `attach` had never been called.

        State and metrics stay readable. Calling it again does nothing.
        """
        self.hooks.detach()

    def __repr__(self) -> str:
        state = f"{self.live_engine.name} engine" if self.attached else "detached"
        return f"<Healing of {type(self.optimizer).__name__}, {state}>"

"""`StepListener`: what hears of each step of a healed optimizer."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from healcore.torch.measurement import StepNorms


class StepListener(Protocol):
    """Hears of each step of one healed optimizer, see `HealedStep.set_listener`.

    A healed step has one listener at a time, which decides what becomes of the step's record:

        attach alone    `IncidentLog`, which writes a line for each incident
        with a Healer   `DriverListener` of the driver, which keeps the step for the run
        Lightning       a listener that passes everything on to that of the driver, and clips

    The methods run inside `optimizer.step()`, so none of them may wait for a device. One call of
    `optimizer.step()` makes these calls:

        judged ─► the optimizer's update, unless the step is skipped ─► ended ─► stepped

    A step without gradients is not judged and makes only the last call. A step that a GradScaler
    has dropped is judged later, outside of `optimizer.step()`, and makes only the first two calls.
    A step that raises makes no further call.
    """

    def judged(self, norms: StepNorms) -> None:
        """Hears that the engine has judged a step, before the optimizer's update.

        `HealedStep.live_engine.pending_record()` reads the record of this step.

        Args:
            norms: the gradient norms of the step, not read on the host yet. Empty for a dropped
                step, and if the norms belong to no single parameter.
        """
        ...

    def ended(self, skipped: bool | Tensor) -> None:
        """Hears that a judged step has ended, after everything was restored.

        Args:
            skipped: whether the step was skipped: a bool, or a 0-d float32 of exactly 0 or 1 on the
                device. In observe mode, and for a dropped step, always False.
        """
        ...

    def stepped(self) -> None:
        """Hears that a call of `optimizer.step()` has ended, also of a step that was not judged."""
        ...

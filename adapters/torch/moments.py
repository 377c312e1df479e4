"""`MomentReset`: resets the moments of an optimizer after a cut of the learning rate."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor
from torch.optim import Adagrad, Optimizer

from healcore.torch.engines import EnforcedDecision, LiveEngine, UnreadRecords, is_cut


def moments_obstacle(optimizer: Optimizer) -> str:
    """Reason why the moments cannot be reset, or an empty string.

    `reset_moments` empties the optimizer's state. torch's own optimizers start with an empty state.
    A library's optimizer may need the state that its constructor has made.
    """
    if not is_third_party(optimizer):
        return ""
    return (
        f"{type(optimizer).__name__} has a step() of its own, and only the optimizers of "
        "torch.optim are known to start with an empty state"
    )


@torch.no_grad()
def reset_moments(optimizer: Optimizer) -> None:
    """Resets moments and step counters, as if the optimizer had not taken a step.

    torch's optimizers create `state` (moments, and the step counter of the bias correction) at a
    parameter's first step, so an empty `state` is the start. Only Adagrad creates its `state` in
    its constructor. Learning rates and schedulers are not in `state`.
    """
    if not isinstance(optimizer, Adagrad):
        optimizer.state.clear()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            state["step"].zero_()
            state["sum"].fill_(group["initial_accumulator_value"])


class MomentReset:
    """Resets the moments of one optimizer at the step after a cut of the learning rate.

    The step that cuts the rate does not reset the moments, because its gradient is damaged and
    would become the first entry of the new moments. A skipped step postpones the reset further.

        host engine      step n cuts ─► step n + 1 resets
        device engine    step n cuts ─► its record is read at step n + RECORD_LAG ─► next step

    Args:
        optimizer: the optimizer, for which `moments_obstacle` has found no obstacle.
        live_engine: the engine that orders the cuts.
    """

    def __init__(self, optimizer: Optimizer, live_engine: LiveEngine) -> None:
        self._optimizer = optimizer
        self._live_engine = live_engine
        self._is_due = False
        """Whether the next step that is not skipped resets the moments."""
        self._unread = UnreadRecords(live_engine)
        """Records of an engine on a device, in which no cut was looked for yet."""

    def carry_out(self, *, skip: bool | Tensor) -> None:
        """Resets the moments if a reset is due. Call it before the optimizer's update.

        Args:
            skip: whether the step is skipped. A tensor on a device is not read, and counts as a
                step that is not skipped.
        """
        if self._is_due and skip is not True:
            reset_moments(self._optimizer)
            self._is_due = False

    def note(self, enforced: EnforcedDecision) -> None:
        """Makes a reset due if this decision cuts the learning rate.

        Args:
            enforced: the decision for the step that runs, in Python numbers.
        """
        if is_cut(enforced.action, enforced.skip):
            self._is_due = True

    def keep_record(self) -> None:
        """Keeps the record of a step that was judged now, if cuts are known only later.

        An engine that judges late has no decision in Python numbers at the step. The cut is read
        from the record some steps later, and the moments are reset then.
        """
        if self._live_engine.is_late:
            self._unread.add()

    def read_cuts(self, *, decision_is_known: bool) -> None:
        """Reads the records that have arrived, and makes a reset due if one of them cuts the rate.

        Args:
            decision_is_known: whether the decision for the step that runs is on the host. Then
                `note` has looked for a cut in it, and the records are not examined.
        """
        for record in self._unread.take_arrived():
            if not decision_is_known and is_cut(record.action, not record.taken):
                self._is_due = True

    def forget(self) -> None:
        """Forgets cuts of an earlier state. Call it after the engine's state is replaced.

        A rollback restores the moments of the checkpoint. A reset that was due before it would drop
        them.
        """
        self._unread.clear()
        self._is_due = False


def is_third_party(optimizer: Optimizer) -> bool:
    """Whether the class defines `step()` outside of torch.optim."""
    return not inspect.unwrap(type(optimizer).step).__module__.startswith("torch.optim.")

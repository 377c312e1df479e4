"""`SignalAllReduce`: the ranks of one run judge the same signals.

DistributedDataParallel reduces gradients but not losses: after a loss spike on one rank only that
rank would skip. Sharded gradients differ between ranks. So before a step is judged, one
`all_reduce` of twelve float64 sums its signals:

    loss, update norm, eval loss    of the ranks that have them
    eval losses, overflows          counts
    losses, update norms, gradients counts
    votes, decision, its square     16 bits of the last step's decision show differing ranks
    squared gradient norm           the sum is the squared global norm, or ranks times it

Per-tensor clipping adds eight bytes for each parameter.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from healcore.core.errors import RanksDisagreeError
from healcore.core.signals import Signals
from healcore.core.verdict import Decision
from healcore.torch.measurement import AsyncCopy
from healcore.torch.ranks import StepRanks

_COUNTED = ("loss", "update_norm", "grad_norm")
"""Signals that one rank may have while another has not."""


class SignalAllReduce:
    """Reduces the signals of a step over `ranks`, on the device `home`.

    In float64, so that the mean of equal float32 values is exactly that value.
    """

    def __init__(self, ranks: StepRanks, home: torch.device) -> None:
        self.ranks = ranks
        self._home = home
        self._zero = torch.zeros((), dtype=torch.float32, device=home)
        self._unchecked: AsyncCopy | None = None
        """Marks that have not been compared between the ranks yet."""
        self.requests_vote = False
        """Whether this rank asks all ranks for a vote, at each step while it is True."""
        self.last_marks: AsyncCopy | None = None
        """(3,) float64 of the last step: votes, bits of the decision, and their squares."""

    @property
    def world(self) -> int:
        """Number of ranks that decide together."""
        return self.ranks.world

    def reduce(
        self,
        signals: Signals,
        squares: Tensor | None,
        found_inf: Tensor | None,
        last: Decision | None,
    ) -> tuple[Signals, Tensor | None]:
        """The mean of each signal over the ranks that have it, and the global norm.

        Every rank calls it at every step, with its own signals, `Measurer.squares`, a GradScaler's
        flag (0-d float32, or None) and its last decision. A sync only if this rank lacks a loss or
        a norm, which another rank may have.

        Returns:
            The signals of all ranks, whose `grad_norm` is None if no rank has gradients, and the
            number of ranks with an overflow, or None without a flag.

        Raises:
            RanksDisagreeError: the ranks' decisions of the last step differ, or at the first step
                their parameters. On an accelerator it is raised some steps later, when the marks
                can be read without waiting.
        """
        if self._unchecked is not None and self._unchecked.has_arrived():
            marks, self._unchecked = self._unchecked, None
            self._raise_if_different(marks)
        zero, given = self._zero, (*signals[:4], found_inf)
        loss, norm, update, evals, overflow = (zero if v is None else v for v in given)
        evaluated = ~torch.isnan(evals)  # NaN means that the step has no evaluation
        evals = torch.where(evaluated, evals, zero)
        flags = *(getattr(signals, name) is not None for name in _COUNTED), self.requests_vote
        counts = (torch.full_like(zero, flag) for flag in flags)
        terms = torch.stack([loss, update, evals, evaluated, overflow > 0, *counts]).double()
        if squares is None:
            groups = () if signals.group_norms is None else (signals.group_norms,)
            squares = torch.cat([norm.reshape(1), *groups]).to(torch.float64).square()
        sums = self._summed(torch.cat([terms, self._mark(last), squares]))
        self.last_marks = AsyncCopy(sums[8:11])
        if self._home.type == "cpu":
            self._raise_if_different(self.last_marks)
        elif self._unchecked is None:
            self._unchecked = self.last_marks
        loss, update, evals, evaluated, overflows, losses, updates, grads = sums[:8].unbind()
        total = sums[11:] if self.ranks.has_parts else sums[11:] / grads
        norms = total.sqrt().to(torch.float32)
        found = {name for name in _COUNTED if getattr(signals, name) is not None}
        if len(found) < len(_COUNTED):
            counts = sums[5:8].cpu().numpy()
            found = {name for name, count in zip(_COUNTED, counts, strict=True) if count}
        evaluation = signals.eval_loss
        reduced = signals._replace(
            loss=(loss / losses).to(torch.float32) if "loss" in found else None,
            update_norm=(update / updates).to(torch.float32) if "update_norm" in found else None,
            grad_norm=norms[0] if "grad_norm" in found else None,
            group_norms=None if signals.group_norms is None else norms[1:],
            eval_loss=None if evaluation is None else (evals / evaluated).to(torch.float32),
        )
        return reduced, None if found_inf is None else overflows.to(torch.float32)

    def _mark(self, last: Decision | None) -> Tensor:
        """(2,) float64: 16 bits of the last decision, or first of the parameters; their square."""
        if last is None:
            bits = torch.full_like(self._zero, self.ranks.fingerprint(), dtype=torch.float64)
        else:
            values = 8.0 * last.skip + 2.0 * last.lr_scale + last.grad_scale
            if not isinstance(values, Tensor):
                values = torch.full_like(self._zero, float(values))
            folded = values.to(torch.float32).view(torch.int32)
            bits = ((folded ^ (folded >> 16)) & 0xFFFF).to(torch.float64)
        return torch.stack([bits, bits * bits])

    def _raise_if_different(self, marks: AsyncCopy) -> None:
        _, bits, squares = marks.read()
        if self.world * squares != bits * bits:
            raise RanksDisagreeError(
                "the ranks decided differently at the previous step, so their parameters differ, "
                "or at the first step their parameters have different shapes: roll back to a "
                "checkpoint, attach with one policy, and call expect_change(), load_state_dict() "
                "and on_rollback() on every rank before the same step; for the stages of a "
                "pipeline pass pp_mesh=mesh['pp'], for ranks of another model process_group="
            )

    def _summed(self, packed: Tensor) -> Tensor:
        """The sum over the ranks, on the signals' device if the group can reduce there."""
        kinds = [device.type for device in self.ranks.group._device_types]
        device = self._home
        if kinds and device.type not in kinds:
            current = torch.get_device_module(kinds[0]).current_device()
            device = torch.device(kinds[0], current)
        packed = packed.to(device)
        dist.all_reduce(packed, group=self.ranks.group)
        return packed.to(self._home, non_blocking=True)


def requests_vote(marks: AsyncCopy | None) -> bool:
    """Whether any rank asked for a vote at the step with these `last_marks`. Waits for the copy."""
    return marks is not None and bool(marks.read()[0])

"""`SignalAllReduce`: the ranks of one run judge the same signals.

DistributedDataParallel reduces gradients but not losses: after a loss spike on one rank only that
rank would skip. Sharded gradients differ between ranks. So before a step is judged, one
`all_reduce` of eight float64 reduces its signals:

    loss, update norm, eval loss    sums over the ranks that have them
    overflows, eval losses, votes   counts, packed in one number
    decision, its square            16 bits of the last step's decision, to detect differing ranks
    squared gradient norm           the sum is the squared global norm, or ranks times it
    losses, update norms, gradients counts, packed in one number

Per-tensor clipping adds eight bytes for each parameter.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from healcore.core.verdict import Decision
from healcore.torch.errors import RanksDisagreeError
from healcore.torch.measurement import AsyncCopy, Measurement
from healcore.torch.ranks import StepRanks

_COUNTED = ("loss", "update_norm", "grad_norm")
"""Signals that one rank may have while another has not."""
_MOST = 1 << 17
"""Base of the packed counts, above any number of ranks: three counts take 51 of 53 bits."""


class SignalAllReduce:
    """Reduces the signals of a step over `ranks`, on the device `home`.

    In float64, so that the mean of equal float32 values is exactly that value.
    """

    def __init__(self, ranks: StepRanks, home: torch.device) -> None:
        self.ranks = ranks
        self._home = home
        self._zero = torch.zeros((), dtype=torch.float32, device=home)
        self._scales = torch.tensor([1, _MOST, _MOST**2], dtype=torch.float64).to(home)
        self._unchecked: AsyncCopy | None = None
        """Marks that have not been compared between the ranks yet."""
        self.requests_vote = False
        """Whether this rank asks all ranks for a vote, at each step while it is True."""
        self.last_marks: AsyncCopy | None = None
        """(3,) float64 of the last step: packed votes, bits of the decision, and their square."""

    @property
    def world(self) -> int:
        """Number of ranks that decide together."""
        return self.ranks.world

    def reduce(self, measured: Measurement, last: Decision | None) -> Measurement:
        """The mean of each signal over the ranks that have it, and the global norm.

        Every rank calls it at every step. A sync only if this rank lacks a loss or a norm, which
        another rank may have. `grad_norm` stays None if no rank has gradients.

        Raises:
            RanksDisagreeError: the ranks' decisions of the last step differ, or at the first step
                their parameters. On an accelerator it is raised some steps later, when the marks
                can be read without waiting.
        """
        if self._unchecked is not None and self._unchecked.has_arrived():
            marks, self._unchecked = self._unchecked, None
            self._raise_if_different(marks)
        sums = self._summed(self._packed(measured, last))
        self.last_marks = AsyncCopy(sums[3:6])
        if self._home.type == "cpu":
            self._raise_if_different(self.last_marks)
        elif self._unchecked is None:
            self._unchecked = self.last_marks
        counts = torch.remainder(torch.floor(sums[7] / self._scales), _MOST)
        means = sums[:2] / counts[:2]
        squares = torch.cat([sums[6:7], sums[8:]])
        if not self.ranks.has_parts:
            squares = squares / counts[2]
        norms = squares.sqrt().to(torch.float32)
        found = {name for name in _COUNTED if getattr(measured, name) is not None}
        if len(found) < len(_COUNTED):
            on_host = counts.cpu().numpy()
            found = {name for name, count in zip(_COUNTED, on_host, strict=True) if count}
        loss, update = means.to(torch.float32).unbind()
        overflows = evals = None
        if measured.found_inf is not None:
            overflows = torch.remainder(sums[3], _MOST).to(torch.float32)
        if measured.eval_loss is not None:
            count = torch.remainder(torch.floor(sums[3] / _MOST), _MOST)
            evals = (sums[2] / count).to(torch.float32)
        return measured._replace(
            loss=loss if "loss" in found else None,
            update_norm=update if "update_norm" in found else None,
            grad_norm=norms[0] if "grad_norm" in found else None,
            group_norms=None if measured.group_norms is None else norms[1:],
            eval_loss=evals,
            found_inf=overflows,
            squares=None,
        )

    def _packed(self, measured: Measurement, last: Decision | None) -> Tensor:
        """This rank's terms of the sums: (8,) float64, or (8 + n,) with `group_norms`."""
        zero = self._zero
        loss, update = (zero if x is None else x for x in (measured.loss, measured.update_norm))
        flags = zero if measured.found_inf is None else (measured.found_inf > 0).to(torch.float32)
        evals = measured.eval_loss
        if evals is None:
            evals = zero
        else:  # NaN means that the step has no evaluation
            has_one = ~torch.isnan(evals)
            flags = flags + _MOST * has_one
            evals = torch.where(has_one, evals, zero)
        head = torch.stack([loss, update, evals, flags]).to(torch.float64)
        squares = measured.squares
        if squares is None:
            norm = zero if measured.grad_norm is None else measured.grad_norm
            each = [norm.reshape(1)]
            if measured.group_norms is not None:
                each.append(measured.group_norms)
            squares = torch.cat(each).to(torch.float64).square()
        counts = sum(
            _MOST**i for i, name in enumerate(_COUNTED) if getattr(measured, name) is not None
        )
        counted = torch.full((1,), counts, dtype=torch.float64, device=self._home)
        if self.requests_vote:
            head[3] += float(_MOST**2)
        mark = self._mark(last)
        return torch.cat([head, mark, squares[:1], counted, squares[1:]])

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
        """The sum over the ranks, float64."""
        device = _reduction_device(self.ranks.group, self._home)
        packed = packed.to(device, torch.float64)
        dist.all_reduce(packed, group=self.ranks.group)
        return packed.to(self._home, non_blocking=True)


def requests_vote(marks: AsyncCopy | None) -> bool:
    """Whether any rank asked for a vote at the step with these `last_marks`. Waits for the copy."""
    return marks is not None and bool(marks.read()[0] >= _MOST**2)


def _reduction_device(group: Any, home: torch.device) -> torch.device:
    """A device on which the group can reduce: the device of the signals if possible."""
    kinds = [device.type for device in group._device_types]
    if home.type in kinds or not kinds:
        return home
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())

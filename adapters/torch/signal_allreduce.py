"""`SignalAllReduce`: the ranks of a data-parallel run judge the same signals.

DistributedDataParallel reduces gradients and leaves the loss local: after a loss spike on one rank
only that rank would skip. So all signals of a step go through one `all_reduce` first.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from healcore.core.verdict import Decision
from healcore.torch.errors import AttachError, RanksDisagreeError
from healcore.torch.measurement import AsyncCopy, Measurement

_SIGNALS = ("loss", "grad_norm", "update_norm", "eval_loss", "found_inf")
_OPTIONAL = frozenset({"loss", "grad_norm", "update_norm"})
"""Signals that one rank may have while another has not."""


class SignalAllReduce:
    """Averages the signals of a step, on the device `home`, over the ranks of a process group.

    In float64, so that a value that is the same on all ranks stays the same float32. `group` is a
    process group, "auto" (the default one, once it is initialized) or None; otherwise AttachError.
    """

    def __init__(self, group: Any, home: torch.device) -> None:
        self._auto = isinstance(group, str) and group == "auto" and dist.is_available()
        is_group = dist.is_available() and isinstance(group, dist.ProcessGroup)
        if not (is_group or group is None or (isinstance(group, str) and group == "auto")):
            raise AttachError(
                "process_group is a torch.distributed process group, 'auto' or None, got "
                f"{type(group).__name__}: leave it out for the default group, or pass None where "
                "every rank has the same loss and the same gradients anyway"
            )
        self._group: Any = group if is_group else None
        self._home = home
        self._zero = torch.zeros((), dtype=torch.float32, device=home)
        self._one = torch.ones((), dtype=torch.float32, device=home)
        self._differs: AsyncCopy | None = None

    @property
    def world(self) -> int:
        """Number of ranks that decide together."""
        if self._auto and dist.is_initialized():
            self._group, self._auto = dist.group.WORLD, False
        return 1 if self._group is None else dist.get_world_size(self._group)

    @property
    def is_first(self) -> bool:
        """Whether this rank logs for all that decide together."""
        return self.world == 1 or dist.get_rank(self._group) == 0

    def mean(self, measured: Measurement, last: Decision | None) -> Measurement:
        """The mean of each signal over the ranks that have it. Every rank calls it at every step.

        A sync only if this rank lacks a loss or a norm, which another may have. `grad_norm` stays
        None if no rank has gradients. RanksDisagreeError if the decisions `last` of the step before
        differ; on an accelerator it comes some steps later, once it can be read without waiting.
        """
        if self._differs is not None and self._differs.has_arrived():
            differs, self._differs = self._differs, None
            _raise_if(differs)
        values, counts = [], []
        for name in _SIGNALS:
            value = getattr(measured, name)
            count = self._zero if value is None else self._one
            if value is None:
                value = self._zero
            elif name == "eval_loss":  # NaN stands for "none at this step"
                count = (~torch.isnan(value)).to(torch.float32)
                value = torch.where(torch.isnan(value), self._zero, value)
            values.append(value)
            counts.append(count)
        checksum = self._checksum(last)
        packed = torch.stack([*values, checksum, *counts, self._one])
        if measured.group_norms is not None:
            packed = torch.cat([packed, measured.group_norms])
        n = len(values) + 1
        sums, ranks, groups = self._summed(packed).tensor_split((n, 2 * n))
        means = (sums / ranks).to(torch.float32).unbind()
        differs = AsyncCopy(means[-1] != checksum)
        if self._home.type == "cpu":
            _raise_if(differs)
        elif self._differs is None:
            self._differs = differs
        absent = {name for name in _SIGNALS if getattr(measured, name) is None}
        if absent & _OPTIONAL:
            has_it = ranks.cpu().numpy()
            absent -= {name for i, name in enumerate(_SIGNALS) if name in _OPTIONAL and has_it[i]}
        reduced = {
            name: mean for name, mean in zip(_SIGNALS, means, strict=False) if name not in absent
        }
        if measured.group_norms is not None:
            reduced["group_norms"] = (groups / self.world).to(torch.float32)
        return measured._replace(**reduced)

    def mean_of(self, value: Tensor | None) -> Tensor:
        """The mean of one 0-d float32 over the ranks that have it; every rank calls it, or none."""
        if self.world == 1:
            return self._zero if value is None else value
        given = [self._zero, self._zero] if value is None else [value, self._one]
        total, ranks = self._summed(torch.stack(given)).unbind()
        return (total / ranks.clamp(min=1)).to(torch.float32)

    def _summed(self, packed: Tensor) -> Tensor:
        """The sum over the ranks, float64."""
        device = _reduction_device(self._group, self._home)
        packed = packed.to(device, torch.float64)
        dist.all_reduce(packed, group=self._group)
        return packed.to(self._home, non_blocking=True)

    def _checksum(self, last: Decision | None) -> Tensor:
        """One float32 that differs where decisions differ; the mean of equal ones is exact."""
        if last is None:
            return self._zero
        if not isinstance(last.grad_scale, Tensor):
            checksum = 8.0 * last.skip + 2.0 * last.lr_scale + last.grad_scale
            return torch.full_like(self._zero, float(checksum))
        return 8.0 * last.skip.to(torch.float32) + 2.0 * last.lr_scale + last.grad_scale


def _raise_if(differs: AsyncCopy) -> None:
    if differs.read():
        raise RanksDisagreeError(
            "the ranks decided different things at the step before, so that their parameters "
            "differ: attach with one policy, and call expect_change(), load_state_dict() and "
            "on_rollback() on every rank before the same step; go back to a checkpoint"
        )


def _reduction_device(group: Any, home: torch.device) -> torch.device:
    """The device on which the group can reduce: that of the signals if possible."""
    kinds = [device.type for device in group._device_types]
    if home.type in kinds or not kinds:
        return home
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())
